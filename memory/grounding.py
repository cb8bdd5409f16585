"""Whether a claim stands on what happened: cited steps exist, quoted words occur, levels and worlds fit.

Every function returns None, or the reason of the rejection in one line: field, value, remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from memory.records import LEVEL_NAMES, AnyItem, EpisodeItem, Evidence, Link, PrincipleItem, TraceStep, Trajectory


def normalise(text: str) -> str:
    """Case-folded, with every run of white space as one space: what a quote is compared by."""
    return " ".join(text.casefold().split())


def occurs(quote: str, step: TraceStep) -> bool:
    """Whether ``quote`` occurs in the step's observation, thought, action or result, up to case and white space."""
    wanted = normalise(quote)
    return any(wanted in normalise(text) for text in (step.observation, step.thought, step.action or "", step.result))


def check_evidence(evidence: Evidence, trajectory: Trajectory) -> str | None:
    """``trajectory`` is the one that the evidence cites."""
    step = next((step for step in trajectory.steps if step.index == evidence.step), None)
    if step is None:
        return (
            f"step: {evidence.step} is not in {evidence.trajectory} ({len(trajectory.steps)} steps); cite one that is"
        )
    if not occurs(evidence.quote, step):
        return (
            f"quote: {short(evidence.quote)} does not occur in step {evidence.step} of {evidence.trajectory}; "
            "quote its words"
        )
    return None


def check_episode(item: EpisodeItem, trajectory: Trajectory | None) -> str | None:
    """A level 1 record beside its trajectory: same world and grammar, key steps that exist, an outcome that is true."""
    if trajectory is None:
        return f"trajectory: {short(item.trajectory)} is not in the memory; add it first"
    if (item.world, item.grammar) != (trajectory.world, trajectory.grammar):
        return _other_world("trajectory", item.trajectory, trajectory, item)
    told = {True: "success", False: "failure", None: item.outcome}[trajectory.success]
    if item.outcome not in (told, "unknown"):
        return f"outcome: {item.outcome!r}, but the trajectory ended in {told}; say so"
    steps = {step.index for step in trajectory.steps}
    for number, key in enumerate(item.key_steps):
        if key.step not in steps:
            return f"key_steps[{number}].step: {key.step} is not in {item.trajectory}; cite one that is"
    return None


def check_link(
    link: Link, lower: Trajectory | AnyItem | None, upper: AnyItem | None, find: Callable[[str], Trajectory | None]
) -> str | None:
    """``lower`` and ``upper`` are the link's ends, ``find`` gives a trajectory by its id; None: not in the memory.

    A link from a trajectory, or from the episode that tells of one, cites that trajectory. One from a procedure may
    cite any, for a contradiction need not come from where the procedure was learnt.
    """
    if lower is None:
        return f"lower: {short(link.lower)} is not in the memory (or was rejected); write it first, or in the same call"
    if upper is None:
        return f"upper: {short(link.upper)} is not in the memory (or was rejected); write it first, or in the same call"
    if upper.level != lower.level + 1:
        return (
            f"upper: {link.upper} ({LEVEL_NAMES[upper.level]}) is not one level above {link.lower} "
            f"({LEVEL_NAMES[lower.level]}); link adjacent levels"
        )
    if (lower.world, lower.grammar) != (upper.world, upper.grammar):
        return _other_world("lower", link.lower, lower, upper)
    if not link.evidence:
        return "evidence: empty; cite at least one step"
    told = link.lower if lower.level == 0 else lower.trajectory if isinstance(lower, EpisodeItem) else None
    for number, evidence in enumerate(link.evidence):
        where = f"evidence[{number}]."
        if told is not None and evidence.trajectory != told:
            return f"{where}trajectory: {short(evidence.trajectory)}, but {link.lower} tells of {told}; cite that one"
        trajectory = find(evidence.trajectory)
        if trajectory is None:
            return f"{where}trajectory: {short(evidence.trajectory)} is not in the memory; add it first"
        if (trajectory.world, trajectory.grammar) != (upper.world, upper.grammar):
            return _other_world(f"{where}trajectory", evidence.trajectory, trajectory, upper)
        reason = check_evidence(evidence, trajectory)
        if reason is not None:
            return where + reason
    return None


def check_predicate(
    item: AnyItem, harm: Mapping[str, Any] | None, find: Callable[[str], Trajectory | None]
) -> str | None:
    """A principle's predicate beside its newest judgement of harm (None: there is none), which must find that violating
    the principle does harm, and cite (``evidence``) where that can be read. Items without a predicate need none."""
    if not isinstance(item, PrincipleItem) or item.predicate is None:
        return None
    if harm is None:
        return "predicate: comes without a judgement of harm; add one, or leave the predicate out"
    if harm.get("harmful") is not True:
        return "predicate: violating the principle is not judged harmful; leave the predicate out"
    cited = harm.get("evidence")
    if not isinstance(cited, list) or not cited:
        return "predicate: its judgement of harm cites no evidence; cite a step that shows the harm"
    for number, entry in enumerate(cited):
        where = f"harm.evidence[{number}]."
        try:
            evidence = Evidence.model_validate(entry)
        except ValidationError as error:
            first = error.errors()[0]
            return f"{where}{'.'.join(map(str, first['loc']))}: {first['msg']}; cite trajectory, step and quote"
        trajectory = find(evidence.trajectory)
        if trajectory is None:
            return f"{where}trajectory: {short(evidence.trajectory)} is not in the memory; add it first"
        if (trajectory.world, trajectory.grammar) != (item.world, item.grammar):
            return _other_world(f"{where}trajectory", evidence.trajectory, trajectory, item)
        reason = check_evidence(evidence, trajectory)
        if reason is not None:
            return where + reason
    return None


def _other_world(field: str, id: str, lower: Trajectory | AnyItem, upper: AnyItem) -> str:
    return (
        f"{field}: {id} is of {lower.world}/{lower.grammar}, the record above of {upper.world}/{upper.grammar}; "
        "build only from the same world and grammar"
    )


def short(text: str) -> str:
    """``text`` quoted, and cut: what a model wrote may be of any length."""
    return repr(text if len(text) <= 80 else text[:77] + "…")
