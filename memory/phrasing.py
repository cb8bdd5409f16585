"""Rules as English: the fields of a principle, without any number, so that the same rule is always the same text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from memory.conditions import quote, shown
from memory.contrast import Finding, Rule
from memory.occasions import Occasions

_ANSWER = 100
"""Most characters of a quoted answer."""


@dataclass(frozen=True)
class Phrases:
    """The texts of a principle (see :class:`memory.records.PrincipleItem`)."""

    condition: str
    guidance: str
    expected_effect: str
    mechanism: str
    scope: str
    exceptions: tuple[str, ...]


def phrase(finding: Finding, at: Occasions, world: str) -> Phrases:
    """``finding`` in words; ``at``: the occasions of its form."""
    rule = finding.rule
    requirement = rule.requirement
    if rule.bad == "refused":
        effect = "the action is taken, and no step is lost"
        mechanism = f'the world refuses the action otherwise, and answers "{usual_answer(finding, at)}"'
    else:
        effect = "the task can still be solved"
        mechanism = "the world lets you, but episodes that did otherwise failed where others still succeeded"
    if requirement.name == "repeats_refused":
        mechanism = f'nothing has changed since, and the answer is "{usual_answer(finding, at)}" again'
    return Phrases(
        condition=_condition(rule),
        guidance=_guidance(rule),
        expected_effect=effect,
        mechanism=mechanism,
        scope=f"tasks of type {rule.task_type}" if rule.task_type else f"all tasks of {world}",
        exceptions=tuple(exception.words() for exception in rule.exceptions),
    )


def usual_answer(finding: Finding, at: Occasions) -> str:
    """The most frequent answer to what breaks the rule, as one short line."""
    answers = Counter(at.events[n].result for n in finding.broken.tolist())
    answer = min(answers, key=lambda text: (-answers[text], text))
    line = " ".join(answer.split())
    return line if len(line) <= _ANSWER else line[: _ANSWER - 1] + "…"


def trigger(rule: Rule) -> str:
    """When the rule speaks, in CEL."""
    parts = [f"action.verb == {quote(rule.verb)}"] if rule.verb else []
    if rule.task_type:
        parts.append(f"task_type == {quote(rule.task_type)}")
    return " && ".join(parts) or "true"


def _condition(rule: Rule) -> str:
    name = rule.requirement.name
    if name == "repeats_refused":
        return "an action was refused"
    if name in ("repeats", "form", "listed"):
        return "you choose an action"
    about = f"you are about to `{rule.verb}`" if rule.verb else "you are about to act"
    if name == "kind" and not rule.requirement.positive:
        return f"{about} and {{{rule.requirement.slot}}} is a {rule.requirement.text}"
    return about


def _guidance(rule: Rule) -> str:
    requirement = rule.requirement
    columns = [f"`{shown(column)}`" for column in requirement.columns]
    if requirement.name == "repeats_refused":
        return "do something else first, not the same action again"
    if requirement.name == "repeats":
        return f"do not play the same action more than {_times(requirement.slot)}"
    if requirement.name == "form":
        forms = " or ".join(f"`{form}`" for form in requirement.forms)
        if requirement.positive:
            return f"write it in one of the forms that the world knows: {forms}"
        if rule.bad == "refused":
            return f"do not write {forms}: the world never takes it"
        return f"do not play {forms}"
    if requirement.name == "listed":
        return "choose one of those that are listed as possible"
    if requirement.name == "kind" and not requirement.positive:
        return "do not do it"
    if requirement.positive:
        if requirement.name == "done":
            return f"do {columns[0]} first"
        if requirement.name == "since":
            return f"do {columns[0]} first, and not {columns[1]} after it"
        if requirement.name == "previous":
            return f"do {columns[0]} just before"
        if requirement.name == "current":
            return f"do {columns[0]} first, as the latest of its kind"
        return f"do it only if {requirement.words()}"
    if requirement.name == "since":
        return f"do not do it after {columns[0]} until {columns[1]} has been done"
    if requirement.name == "done":
        return f"do not do it once {columns[0]} has been done"
    return f"do it only if {requirement.words()}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
