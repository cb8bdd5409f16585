"""An expert who makes mistakes, in any world: rollouts from which a builder may learn what is right and what is not."""

from __future__ import annotations

import random

from envs.base import Task, TextEnv
from memory.records import TraceStep, Trajectory
from tests.planted import trace_step
from train.demonstrations import mistaken_action

CHANCE = 0.08
"""Of each kind of mistake, at each step."""


def _solution(env: TextEnv, task: Task) -> list[str]:
    """What the expert plays alone."""
    result, actions = env.reset(task), list[str]()
    while not result.done:
        actions.append(env.expert().action)
        result = env.step(actions[-1])
    return actions


def stumble(env: TextEnv, task: Task, number: int) -> Trajectory:
    """One episode. Mistakes, drawn by ``number``: any admissible action; one played before; one that the world refuses
    (:func:`train.demonstrations.mistaken_action`); what the expert does, with something else; what the expert would do
    later; and after a refusal, in half of the cases, the same again."""
    rng = random.Random(number)
    solution = _solution(env, task)
    result = env.reset(task)
    goal, told = result.goal, list[TraceStep]()
    while not result.done:
        action, kind = env.expert().action, int(rng.random() / CHANCE)
        earlier = [step.action or "" for step in told]
        if told and told[-1].valid is False and rng.random() < 0.5:
            action = earlier[-1]
        elif kind == 0:
            action = rng.choice(env.admissible())
        elif kind == 1 and earlier:
            action = rng.choice(earlier)
        elif kind == 2:
            action = mistaken_action(action, earlier, env.admissible(), rng) or action
        elif kind == 3:
            alike = [other for other in env.admissible() if other.split()[:1] == action.split()[:1]]
            action = rng.choice(alike) if alike else action
        elif kind == 4:
            later = [other for other in solution if other not in earlier and other != action]
            action = rng.choice(later) if later else action
        after = env.step(action)
        told.append(trace_step(len(told), result, action, after))
        result = after
    return Trajectory(
        source=f"run:test/{number}",
        world=task.env,
        grammar=task.env,
        task=task.id,
        task_type=task.type,
        goal=goal,
        success=result.won,
        score=result.score,
        steps=tuple(told),
    )
