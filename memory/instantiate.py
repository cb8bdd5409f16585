"""A principle becomes one operational constraint for the situation at hand, or is suppressed with a reason.

By a model (:func:`instantiation_prompt`, :func:`parse_instantiation`), or offline (:func:`instantiate_offline`), by
what the principle says of its condition and scope. A model's answer is untrusted: one line of it is used at most.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memory.records import PrincipleItem
from memory.usage import Instantiation

LONGEST_CONSTRAINT = 300
"""Characters. A longer answer is no one constraint."""


@dataclass(frozen=True)
class Situation:
    """What is known when an episode begins."""

    goal: str
    observation: str
    task_type: str = ""
    plan: str = ""


INSTRUCTIONS = """\
You decide whether a rule learnt in earlier games helps in this one, and say what it means here. The task's own \
instructions take precedence over the rule. Answer with one line, in one of these two forms:
Constraint: <one short instruction for this task, naming what is here>
Suppress: <why the rule does not apply here>"""
"""The system prompt of an instantiation."""


def instantiation_prompt(principle: PrincipleItem, situation: Situation) -> str:
    """The question whose answer :func:`parse_instantiation` reads."""
    parts = [
        f"Task: {situation.goal}" if situation.goal else "",
        f"You see: {situation.observation}",
        f"Plan: {situation.plan}" if situation.plan else "",
        f"Rule: {principle.text()}",
        f"Scope of the rule: {principle.scope}" if principle.scope else "",
        "Constraint or Suppress?",
    ]
    return "\n".join(part for part in parts if part)


_ANSWER = re.compile(r"^[\s*_>-]*(constraint|suppress(?:ed)?)[*_ \t]*:[*_ \t]*(.*?)[\s*_]*$", re.I | re.M)


def parse_instantiation(item: str, text: str) -> Instantiation:
    """Read an answer: its first line of one of the two forms counts; anything else suppresses the item."""
    found = _ANSWER.search(text)
    if found is None or not found[2]:
        return Instantiation(item=item, reason=f"unparsable answer: {_shortened(text)!r}")
    if found[1].lower().startswith("suppress"):
        return Instantiation(item=item, reason=_shortened(found[2]))
    if len(found[2]) > LONGEST_CONSTRAINT:
        return Instantiation(item=item, reason=f"constraint of {len(found[2])} characters, over {LONGEST_CONSTRAINT}")
    return Instantiation(item=item, text=found[2])


def _shortened(text: str) -> str:
    """At most 200 characters on one line."""
    line = " ".join(text.split())
    return line if len(line) <= 200 else line[:199] + "…"
