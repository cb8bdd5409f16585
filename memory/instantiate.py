"""A principle becomes one operational constraint for the situation at hand, or is suppressed with a reason.

By the policy (:func:`instantiation_prompt`, :func:`parse_instantiation`), by the builder
(:func:`instantiate_by_builder`), or offline (:func:`instantiate_offline`), by what the principle says of its condition
and scope. A model's answer is untrusted: one line of it is used at most.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from memory.language_model import BudgetSpent, LanguageModel, UnusableAnswer
from memory.records import PrincipleItem
from memory.usage import Instantiation

LONGEST_CONSTRAINT = 300
"""Characters. A longer answer is no one constraint."""

ANNOUNCED = 0.9
"""A kind of thing that so many of its games name at their beginning is absent where the beginning does not name it."""


@dataclass(frozen=True)
class Situation:
    """What is known when an episode begins."""

    goal: str
    observation: str
    task_type: str = ""
    plan: str = ""


_QUESTION = """\
You decide whether a rule learnt in earlier games helps in this one, and say what it means here. The task's own \
instructions take precedence over the rule."""

INSTRUCTIONS = f"""\
{_QUESTION} Answer with one line, in one of these two forms:
Constraint: <one short instruction for this task, naming what is here>
Suppress: <why the rule does not apply here>"""
"""The system prompt of an instantiation by the policy."""


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


class BuilderAnswer(BaseModel):
    """``text``: one short instruction for this task, naming what is here; or, where the rule does not apply, why."""

    model_config = ConfigDict(extra="forbid")
    applies: bool
    text: Annotated[str, WithJsonSchema({"type": "string", "maxLength": LONGEST_CONSTRAINT})]


def instantiate_by_builder(model: LanguageModel, principle: PrincipleItem, situation: Situation) -> Instantiation:
    """Ask the builder's model, whose answers are cached; what cannot be used, or paid for, suppresses the item.

    Raises:
        LanguageModelFault: the request failed for good.
    """
    messages = [
        {"role": "system", "content": f"{_QUESTION} {BuilderAnswer.__doc__}"},
        {"role": "user", "content": instantiation_prompt(principle, situation)},
    ]
    try:
        answer = model.structured(messages, BuilderAnswer)
    except (BudgetSpent, UnusableAnswer) as fault:
        return Instantiation(item=principle.id, reason=_shortened(str(fault)))
    word = "Constraint" if answer.applies else "Suppress"
    return parse_instantiation(principle.id, f"{word}: {' '.join(answer.text.split())}")


def instantiate_offline(principle: PrincipleItem, situation: Situation, names: Mapping[str, float]) -> Instantiation:
    """Match task type, condition and scope with the situation; what applies is said with what is here.

    A principle is suppressed when it is of another task type, or when condition and scope name kinds of things, none of
    them occurs in the task, the plan or the first observation, and games with such things name them there. What it asks
    of later moments cannot be known yet and stays part of the constraint.

    Args:
        names: the kinds of things that actions of this grammar name, each with the share of the games in which it was
            acted on whose task or first observation named it (see :func:`memory.guide.learn_words`).
    """
    if principle.task_type and situation.task_type and principle.task_type != situation.task_type:
        return Instantiation(item=principle.id, reason=f"learnt in tasks of type {principle.task_type}")
    about = f"{principle.condition} {principle.scope}"
    named = sorted(name for name in names if find_name(name, about))
    here = f"{situation.goal}\n{situation.plan}\n{situation.observation}"
    present = [thing for name in named if (thing := find_name(name, here))]
    if named and not present and all(names[name] >= ANNOUNCED for name in named):
        return Instantiation(item=principle.id, reason=f"neither task nor first observation names {', '.join(named)}")
    constraint = f"When {principle.condition}: {principle.guidance.rstrip('.')}."
    if principle.exceptions:
        constraint += f" Except: {'; '.join(principle.exceptions)}."
    if present:
        constraint += f" Here: {', '.join(present)}."
    return Instantiation(item=principle.id, text=constraint)


def find_name(name: str, text: str) -> str:
    """The first place in ``text`` that says ``name`` as whole words, with the number that follows it; "": nowhere."""
    found = re.search(rf"(?<!\w){re.escape(name)}(?: \d+)?(?!\w)", text, re.IGNORECASE)
    return found[0] if found else ""


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
