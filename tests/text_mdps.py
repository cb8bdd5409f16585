"""Small text worlds with known dynamics, and value iteration for what Q-learning must find in them.

Each world tells its state in words; an action is a word. Dynamics are a table: state -> action -> outcomes, each with
its probability, reward and next state (None: the end).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envs.base import EnvFault, ExpertMove, StepResult, Task, TextEnv


@dataclass(frozen=True)
class Outcome:
    probability: float
    reward: float
    next: str | None


Dynamics = Mapping[str, Mapping[str, Sequence[Outcome]]]


def chain() -> Dynamics:
    """Five rooms in a row; only the way right out of the last one pays."""

    def move(room: int, action: str) -> Outcome:
        if action == "go left":
            return Outcome(1.0, 0.0, f"room {max(1, room - 1)}")
        return Outcome(1.0, float(room == 5), None if room == 5 else f"room {room + 1}")

    return {f"room {n}": {action: [move(n, action)] for action in ("go left", "go right")} for n in range(1, 6)}


def grid() -> Dynamics:
    """Three by three squares: a far corner pays 1, the middle costs 0.5 and ends it, walls leave you where you are."""
    steps = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}

    def move(x: int, y: int, dx: int, dy: int) -> Outcome:
        to = (min(2, max(0, x + dx)), min(2, max(0, y + dy)))
        if to == (2, 2):
            return Outcome(1.0, 1.0, None)
        if to == (1, 1):
            return Outcome(1.0, -0.5, None)
        return Outcome(1.0, 0.0, square(*to))

    return {
        square(x, y): {name: [move(x, y, dx, dy)] for name, (dx, dy) in steps.items()}
        for x in range(3)
        for y in range(3)
        if (x, y) not in ((1, 1), (2, 2))
    }


def square(x: int, y: int) -> str:
    """Named in one word, for an embedder that does not mind the order of words."""
    return f"square {'abc'[x]}{y}"


def two_doors() -> Dynamics:
    """The red door pays 1 three times in ten, the blue one 0.4 always, after a hall that may hold you back."""
    return {
        "hall": {"walk": [Outcome(0.8, 0.0, "doors"), Outcome(0.2, 0.0, "hall")], "leave": [Outcome(1.0, 0.1, None)]},
        "doors": {
            "open the red door": [Outcome(0.3, 1.0, None), Outcome(0.7, 0.0, None)],
            "open the blue door": [Outcome(1.0, 0.4, None)],
            "step back": [Outcome(1.0, 0.0, "hall")],
        },
    }


def value_iteration(dynamics: Dynamics, gamma: float, sweeps: int = 500) -> dict[tuple[str, str], float]:
    """Q* of each (state, action) (Bellman 1957)."""
    q = {(state, action): 0.0 for state, actions in dynamics.items() for action in actions}
    for _ in range(sweeps):
        best = {state: max(q[state, action] for action in actions) for state, actions in dynamics.items()}
        q = {
            (state, action): sum(
                o.probability * (o.reward + gamma * (0.0 if o.next is None else best[o.next])) for o in outcomes
            )
            for state, actions in dynamics.items()
            for action, outcomes in actions.items()
        }
    return q


class TextMdp(TextEnv):
    """``dynamics`` as a text world. Its reward is the change of a score in [0, 1], as everywhere: rewards are scaled by
    1/2 and start at 1/2, so that each lies between."""

    SCALE = 0.5

    def __init__(self, dynamics: Dynamics, start: str, max_steps: int) -> None:
        super().__init__(max_steps)
        self._dynamics, self._start = dynamics, start

    def _reset(self, task: Task, seed: int) -> StepResult:
        self._random = random.Random(seed)
        self._state = task.id or self._start
        self._score = 0.5
        return StepResult(f"You are in {self._state}.", score=self._score, goal="get rich")

    def _step(self, action: str) -> StepResult:
        outcomes = self._dynamics[self._state].get(action)
        if outcomes is None:
            return StepResult("No.", score=self._score, valid=False)
        [outcome] = self._random.choices(outcomes, [item.probability for item in outcomes])
        self._score += self.SCALE * outcome.reward
        if outcome.next is None:
            return StepResult("It is over.", score=self._score, done=True, won=outcome.reward > 0)
        self._state = outcome.next
        return StepResult(f"You are in {self._state}.", score=self._score)

    def admissible(self) -> list[str]:
        return sorted(self._dynamics[self._state])

    def expert(self) -> ExpertMove:
        raise EnvFault("these worlds have no expert")

    def close(self) -> None:
        return None
