"""What a building language model is shown: versioned instructions and rendered material; and what its claims are worth.

Everything here is a pure function of records, so that equal memories ask equal questions and the cache answers them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

from memory.answers import Citation
from memory.grounding import check_evidence
from memory.language_model import Message
from memory.records import EpisodeItem, Evidence, PrincipleItem, ProcedureItem, TraceStep, Trajectory

_PROMPTS = Path(__file__).with_name("prompts")
_VERSION = re.compile(r"<!-- version: (\d+) -->\n")

_ANSWER_CHARACTERS = 300
"""Of a world's answer in the list of an attempt's actions."""
_ACTIONS = 60
"""Actions of an attempt that are listed in the later stages, the same one in a row counted once."""


@dataclass(frozen=True)
class Instructions:
    """A file of ``memory/prompts``. ``label``, as ``episode@1``, stands in the records that it led to."""

    name: str
    version: int
    text: str

    @property
    def label(self) -> str:
        return f"{self.name}@{self.version}"

    def messages(self, material: str) -> list[Message]:
        return [{"role": "system", "content": self.text}, {"role": "user", "content": material}]


@cache
def instructions(name: str) -> Instructions:
    text = (_PROMPTS / f"{name}.md").read_text(encoding="utf-8")
    version = _VERSION.match(text)
    if version is None:
        raise ValueError(f"memory/prompts/{name}.md does not begin with its version")
    return Instructions(name, int(version[1]), text[version.end() :].strip())


# ---- what evidence is worth


@dataclass(frozen=True)
class Attempt:
    """An episode with the trajectory that it tells of."""

    episode: EpisodeItem
    trajectory: Trajectory


def check_claim(step: int, quote: str, trajectory: Trajectory) -> str | None:
    """What is wrong with a cited step, in a sentence for the model; None: nothing. An empty quote proves nothing."""
    if not quote.strip():
        return f"step {step}: the quote is empty; quote words of the step."
    if step < 0:
        return f"step {step} does not exist."
    wrong = check_evidence(Evidence(trajectory=trajectory.id, step=step, quote=quote), trajectory)
    if wrong is None:
        return None
    if wrong.startswith("quote"):
        return f"step {step}: the quote {quote[:80]!r} does not stand in it; copy words of that step letter by letter."
    return f"step {step} does not exist; the steps are 0 to {len(trajectory.steps) - 1}."


def check_citation(cited: Citation, shown: dict[str, Attempt]) -> str | None:
    """The same for a citation of one of the attempts shown (E1, …)."""
    attempt = shown.get(cited.episode)
    if attempt is None:
        return f"episode {cited.episode!r} is none of those shown ({', '.join(shown)})."
    wrong = check_claim(cited.step, cited.quote, attempt.trajectory)
    return f"{cited.episode}, {wrong}" if wrong else None


# ---- material


def episode_material(trajectory: Trajectory, step_characters: int, characters: int) -> str:
    """One trajectory, step by step; equal steps in a row are told once, and what is too long lacks its middle."""
    head = [
        f"World: {trajectory.world}",
        *([f"Kind of task: {trajectory.task_type}"] if trajectory.task_type else []),
        f"Task: {trajectory.goal or '(see the first observation)'}",
        f"How it ended: {_ending(trajectory)}",
        f"First observation: {cut(trajectory.steps[0].observation, 2 * step_characters)}",
    ]
    blocks = []
    before = trajectory.steps[0].observation
    for group in _runs(trajectory.steps, thoughts=True):
        first = group[0]
        lines = [f"[{first.index}]"]
        if first.observation != before:
            lines.append(f"saw: {cut(first.observation, step_characters)}")
        if first.thought:
            lines.append(f"thought: {cut(first.thought, step_characters)}")
        lines.append(f"action: {first.action if first.action is not None else '(none)'}")
        if first.result:
            mark = " (refused)" if first.valid is False else ""
            lines.append(f"answer{mark}: {cut(first.result, step_characters)}")
        blocks.append("\n    ".join(lines))
        if len(group) > 1:
            blocks.append(f"[{group[1].index}]-[{group[-1].index}] the same again")
        before = group[-1].result
    return "\n".join([*head, "Steps:", *_shortened(blocks, characters)])


def procedures_material(
    task_type: str, forms: Sequence[str], known: Sequence[tuple[str, ProcedureItem, str]], shown: dict[str, Attempt]
) -> str:
    """``known``: (alias, procedure, how it stands)."""
    parts = [f"Kind of task: {task_type or '(not named)'}", _forms(forms), "Known procedures:"]
    parts += [_procedure(*row) for row in known] or ["(none)"]
    parts += ["New attempts:", *(attempt_material(alias, attempt) for alias, attempt in shown.items())]
    return "\n\n".join(parts)


def principles_material(
    task_type: str,
    forms: Sequence[str],
    procedures: Sequence[tuple[str, ProcedureItem, str]],
    known: Sequence[tuple[str, PrincipleItem, str]],
    shown: dict[str, Attempt],
) -> str:
    parts = [f"Kind of task: {task_type or '(not named)'}", _forms(forms), "Procedures:"]
    parts += [_procedure(*row) for row in procedures]
    parts.append("Known principles:")
    parts += [f"[{alias}] ({standing}) {principle_text(item)}" for alias, item, standing in known] or ["(none)"]
    parts += ["Attempts:", *(attempt_material(alias, attempt) for alias, attempt in shown.items())]
    return "\n\n".join(parts)


def harm_material(item: PrincipleItem, shown: dict[str, Attempt]) -> str:
    parts = [f"Principle: {principle_text(item)}", "Attempts:"]
    return "\n\n".join([*parts, *(attempt_material(alias, attempt) for alias, attempt in shown.items())])


def predicate_material(item: PrincipleItem, forms: Sequence[str], why: str, shown: dict[str, Attempt]) -> str:
    parts = [f"Principle: {principle_text(item)}", f"Why violating it is harmful: {why}", _forms(forms), "Attempts:"]
    return "\n\n".join([*parts, *(attempt_material(alias, attempt) for alias, attempt in shown.items())])


def principle_text(item: PrincipleItem) -> str:
    more = [
        f"{name}: {text}"
        for name, text in (("Expected effect", item.expected_effect), ("Scope", item.scope))
        if text.strip()
    ]
    return " ".join([item.text(), *more, *([] if item.task_type else ["For any kind of task."])])


def attempt_material(alias: str, attempt: Attempt) -> str:
    """An attempt in the later stages: what its episode says, and its actions with the world's answers."""
    episode, trajectory = attempt.episode, attempt.trajectory
    lines = [f"[{alias}] {_ending(trajectory)}. Task: {episode.goal}"]
    lines += [f"  key step {key.step}: {key.what}" for key in episode.key_steps]
    lines += [f"  obstacle: {obstacle}" for obstacle in episode.obstacles]
    lines.append("  actions -> answers:")
    groups = [group for group in _runs(trajectory.steps, thoughts=False) if group[0].action is not None]
    rows = []
    for group in groups:
        first = group[0]
        again = f" (the same again up to step {group[-1].index})" if len(group) > 1 else ""
        mark = "(refused) " if first.valid is False else ""
        rows.append(f"  {first.index}: {first.action} -> {mark}{cut(first.result, _ANSWER_CHARACTERS)}{again}")
    if len(rows) > _ACTIONS:
        half = _ACTIONS // 2
        rows = [*rows[:half], f"  … {len(rows) - 2 * half} left out …", *rows[-half:]]
    return "\n".join([*lines, *rows])


def contrast(attempts: Iterable[Attempt], size: int) -> list[Attempt]:
    """At most ``size`` attempts: each failed one with the successful one that is nearest by the words of its goal."""
    left = list(attempts)
    failed = [attempt for attempt in left if attempt.episode.outcome != "success"]
    succeeded = [attempt for attempt in left if attempt.episode.outcome == "success"]
    chosen: list[Attempt] = []
    while (failed or succeeded) and len(chosen) < size:
        if failed:
            chosen.append(failed.pop(0))
        if succeeded and len(chosen) < size:
            goal = _words(chosen[-1].episode.goal) if chosen else frozenset()
            nearest = max(succeeded, key=lambda attempt: _overlap(goal, _words(attempt.episode.goal)))
            succeeded.remove(nearest)
            chosen.append(nearest)
    return chosen


def beside(shown: Sequence[Attempt], older: Iterable[Attempt], size: int) -> list[Attempt]:
    """At most ``size`` of ``older``, of the outcome that ``shown`` lacks: without a contrast no rule shows."""
    outcomes = {attempt.episode.outcome == "success" for attempt in shown}
    if len(outcomes) != 1:
        return []
    goals = [_words(attempt.episode.goal) for attempt in shown]
    other = [attempt for attempt in older if (attempt.episode.outcome == "success") not in outcomes]
    other.sort(key=lambda attempt: -max(_overlap(goal, _words(attempt.episode.goal)) for goal in goals))
    return other[:size]


def cut(text: str, limit: int) -> str:
    """``text`` on one line, cut in the middle to about ``limit`` characters. White space is of no account in quotes."""
    line = " ".join(text.split())
    if len(line) <= limit:
        return line
    return f"{line[: limit - limit // 3]} […] {line[-(limit // 3) :]}"


def _ending(trajectory: Trajectory) -> str:
    outcome = {True: "success", False: "failure", None: "outcome unknown"}[trajectory.success]
    score = f" with score {trajectory.score:.2f}" if 0 < trajectory.score < 1 else ""
    return f"{outcome}{score}{', the record breaks off' if trajectory.status == 'truncated' else ''}"


def _procedure(alias: str, item: ProcedureItem, standing: str) -> str:
    steps = "\n".join(f"  {number}. {step}" for number, step in enumerate(item.steps, 1))
    pitfalls = "".join(f"\n  pitfall: {pitfall}" for pitfall in item.pitfalls)
    return f"[{alias}] ({standing}) When {item.when}:\n{steps}{pitfalls}"


def _forms(forms: Sequence[str]) -> str:
    return f"Forms of the actions: {'; '.join(forms) or '(not known)'}"


def _runs(steps: Sequence[TraceStep], *, thoughts: bool) -> list[list[TraceStep]]:
    """Steps in a row with equal action and answer, and equal thought where ``thoughts`` are told."""

    def told(step: TraceStep) -> tuple[str | None, ...]:
        return (step.action, step.result, step.thought if thoughts else "")

    return [list(group) for _, group in groupby(steps, key=told)]


def _shortened(blocks: list[str], limit: int) -> list[str]:
    """``blocks`` in at most about ``limit`` characters: the first and last ones, and a note in between."""
    if sum(map(len, blocks)) <= limit:
        return blocks
    head, tail = _fitting(blocks, limit // 2), _fitting(blocks[::-1], limit // 2)[::-1]
    return [*head, f"(steps left out here: {len(blocks) - len(head) - len(tail)})", *tail]


def _fitting(blocks: Sequence[str], limit: int) -> list[str]:
    """The leading blocks within ``limit`` characters, at least one."""
    chosen: list[str] = []
    used = 0
    for block in blocks:
        used += len(block)
        if chosen and used > limit:
            break
        chosen.append(block)
    return chosen


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.lower()))


def _overlap(one: Collection[str], other: Collection[str]) -> float:
    """Jaccard index of two sets of words."""
    union = set(one) | set(other)
    return len(set(one) & set(other)) / len(union) if union else 0.0
