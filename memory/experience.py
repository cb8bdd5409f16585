"""Episodes as Q-learning sees them: valued steps with a state, a thought, and what was earned until the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from memory.records import Trajectory


@dataclass(frozen=True)
class Visit:
    """One valued step.

    ``rewards``: from this step on until the next valued one, in order (more than one where a reply held nothing that
    could be valued). ``options``: the thoughts that the agent could choose from; (): not known.
    """

    step: int
    state: str
    thought: str
    rewards: tuple[float, ...]
    refused: bool = False
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experience:
    """An episode. ``order``: its place among others (updates are made in sorted order, whatever order they came in);
    ``ended``: nothing follows the last step. False: it breaks off there, so the last step teaches nothing."""

    trajectory: str
    order: str
    visits: tuple[Visit, ...]
    ended: bool = True
    round: int = 0


def read_experience(
    trajectory: Trajectory,
    states: Sequence[str],
    store: Literal["thought", "action"],
    *,
    thoughts: Sequence[str] | None = None,
    options: Sequence[Sequence[str]] | None = None,
) -> Experience:
    """The valued steps of a trajectory: those with a thought (``store: action``: with an action).

    Args:
        states: the state's summary at each step.
        thoughts: of each step, in place of the written ones.
        options: of each step the thoughts that could be chosen.
    """
    visits: list[Visit] = []
    for place, step in enumerate(trajectory.steps):
        written = step.thought if store == "thought" else step.action or ""
        valued = " ".join((written if thoughts is None else thoughts[place]).split())
        if not valued:
            if visits:
                last = visits[-1]
                visits[-1] = _with_reward(last, step.reward)
            continue
        visits.append(
            Visit(
                step=step.index,
                state=states[place],
                thought=valued,
                rewards=(step.reward,),
                refused=step.valid is False,
                options=tuple(options[place]) if options is not None else (),
            )
        )
    return Experience(
        trajectory=trajectory.id,
        order=trajectory.source,
        visits=tuple(visits),
        ended=trajectory.status != "truncated",
        round=trajectory.round,
    )


def rewards_or_outcome(trajectory: Trajectory) -> Trajectory:
    """``trajectory`` with its score as the last step's reward where the source tells no rewards."""
    if not trajectory.steps or trajectory.score <= 0 or any(step.reward for step in trajectory.steps):
        return trajectory
    last = trajectory.steps[-1].model_copy(update={"reward": trajectory.score})
    return trajectory.model_copy(update={"steps": (*trajectory.steps[:-1], last)})


def _with_reward(visit: Visit, reward: float) -> Visit:
    return Visit(visit.step, visit.state, visit.thought, (*visit.rewards, reward), visit.refused, visit.options)
