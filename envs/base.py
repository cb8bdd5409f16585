"""The contract of a text world: tasks in, observations out, and one place that counts steps.

A world implements the four underscored methods of :class:`TextEnv`; counting, the step cap and the clamping of the
score live here, so that no two worlds can disagree on them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace


class EnvFault(RuntimeError):
    """The simulator failed (crashed, hung, answered nonsense): the episode's fault is not the agent's."""


class TaskError(ValueError):
    """A task, task set or data folder that does not exist or does not match its manifest (exit code 2)."""


@dataclass(frozen=True)
class Task:
    """One thing to do in one start state.

    ``id`` names it inside its world and is stable for ever: ``valid_seen/<game>/<trial>`` (ALFWorld),
    ``easy/1000017`` (generated household: difficulty/seed), ``boil/21`` (ScienceWorld: task/variation), a game file's
    path (Jericho). ``type`` groups tasks in reports. ``sha256`` pins the content of the game where it has one.
    """

    env: str
    id: str
    type: str
    sha256: str | None = None


@dataclass(frozen=True)
class StepResult:
    """What the world answered.

    ``reward`` is the change of ``score`` since the previous result, ``score`` lies in [0, 1]; ``done`` means that
    the episode is over, ``won`` that the task was solved, ``truncated`` that the step cap ended it. ``valid`` is False
    when the world did not understand or refused the action. ``goal`` is the task's instruction; ``reset`` fills it.
    ``inventory``: names of what the agent holds now, as actions name it, where the world tells it unasked; None: it
    does not.
    """

    observation: str
    reward: float = 0.0
    score: float = 0.0
    done: bool = False
    won: bool = False
    truncated: bool = False
    valid: bool = True
    goal: str = ""
    inventory: list[str] | None = None


@dataclass(frozen=True)
class ExpertMove:
    """An expert's next action and the sub-goal behind it as a short first-person thought ('' when it has none)."""

    action: str
    thought: str = ""


class TextEnv(ABC):
    """One text world played by one agent at a time.

    Args:
        max_steps: step cap; the result of step number ``max_steps`` has ``done`` and (unless won) ``truncated`` set.
    """

    def __init__(self, max_steps: int) -> None:
        if max_steps < 1:
            raise ValueError(f"max_steps: {max_steps}; give at least 1")
        self.max_steps = max_steps
        self.steps = 0
        self._last: StepResult | None = None

    def reset(self, task: Task, seed: int = 0) -> StepResult:
        """Start ``task``. Raises TaskError for a task this world lacks, EnvFault when the simulator fails."""
        self.steps = 0
        first = self._reset(task, seed)
        self._last = replace(first, score=_clamp(first.score), reward=0.0)
        return self._last

    def step(self, action: str) -> StepResult:
        """Play one action. Raises RuntimeError before ``reset`` or after the end, EnvFault when the simulator fails."""
        if self._last is None:
            raise RuntimeError("step: call reset first")
        if self._last.done:
            raise RuntimeError("step: the episode is over; call reset")
        result = self._step(action)
        self.steps += 1
        score = _clamp(result.score)
        capped = self.steps >= self.max_steps and not result.won
        self._last = replace(
            result,
            score=score,
            reward=score - self._last.score,
            done=result.done or result.won or capped,
            truncated=capped and not result.done,
        )
        return self._last

    @abstractmethod
    def _reset(self, task: Task, seed: int) -> StepResult: ...

    @abstractmethod
    def _step(self, action: str) -> StepResult: ...

    @abstractmethod
    def admissible(self) -> Sequence[str]:
        """The actions the world would accept now, sorted. Dear in some worlds: ask only when needed."""

    @abstractmethod
    def expert(self) -> ExpertMove:
        """The expert's move for the present situation, whatever was played so far.

        An expert resumes after foreign or invalid actions. Raises EnvFault when this world has no expert for the task.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the simulator. May be called twice."""


def _clamp(score: float) -> float:
    return min(1.0, max(0.0, score))
