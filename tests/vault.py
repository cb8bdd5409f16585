"""A small made-up memory for tests: one world, a vault, and records of all four levels."""

from __future__ import annotations

from memory.records import (
    AnyItem,
    EpisodeItem,
    Evidence,
    KeyStep,
    Link,
    PrincipleItem,
    ProcedureItem,
    TraceStep,
    Trajectory,
)


def trajectory(number: int = 0, **changes: object) -> Trajectory:
    steps = (
        TraceStep(index=0, observation="You are in a vault.", thought="Open it.", action="pull lever", result="Click."),
        TraceStep(index=1, observation="Click.", action="enter  Door", result="The door\nis OPEN now.", reward=1.0),
    )
    base = Trajectory(
        source=f"file#{number}", world="vault", grammar="v1", task=f"task-{number}", task_type="open", goal="Get in.",
        success=True, score=1.0, steps=steps,
    )  # fmt: skip
    return base.model_copy(update=changes)


def episode(of: Trajectory, **changes: object) -> EpisodeItem:
    base = EpisodeItem(
        world=of.world, grammar=of.grammar, task_type=of.task_type, trajectory=of.id, goal=of.goal, outcome="success",
        key_steps=(KeyStep(step=0, what="the lever unlocks"),),
    )  # fmt: skip
    return base.model_copy(update=changes)


PROCEDURE = ProcedureItem(world="vault", grammar="v1", task_type="open", when="a door is shut", steps=("pull {0}",))
PRINCIPLE = PrincipleItem(world="vault", grammar="v1", condition="a lever is in sight", guidance="pull it first")


def link(lower: str, upper: str, of: Trajectory, step: int = 0, quote: str = "click", **changes: object) -> Link:
    base = Link(lower=lower, upper=upper, evidence=(Evidence(trajectory=of.id, step=step, quote=quote),))
    return base.model_copy(update=changes)


def hierarchy(of: Trajectory) -> tuple[list[AnyItem], list[Link]]:
    told = episode(of)
    return [PRINCIPLE, PROCEDURE, told], [
        link(PROCEDURE.id, PRINCIPLE.id, of),
        link(told.id, PROCEDURE.id, of, step=1, quote="the door is open"),
        link(of.id, told.id, of, step=1, quote="enter door"),
    ]
