"""Made-up trajectories with a known mistake, for tests of the audit.

An agent searches boxes for a key and puts it into a chest. Putting it into a chest that it has not opened breaks the
key: the episode goes on to the step cap and fails. Some episodes fail for other reasons, so failures are longer,
whatever the rule; and taking something while the hands are full is refused, and costs a step.
"""

from __future__ import annotations

import random

from memory.records import PrincipleItem, TraceStep, Trajectory

CAP = 40


def parse(action: str) -> tuple[str, tuple[str, ...]]:
    """``verb name`` and ``verb name in name``."""
    words = action.split()
    if len(words) == 4:
        return f"{words[0]} {{0}} {words[2]} {{1}}", (words[1], words[3])
    return f"{words[0]} {{0}}", tuple(words[1:])


def episode(seed: int, *, mistake: float = 0.4, refused: float = 0.5, lost: float = 0.3, kind: str = "a") -> Trajectory:
    chance = random.Random(seed)
    steps: list[TraceStep] = []

    def act(action: str, result: str = "Done.", valid: bool = True) -> None:
        steps.append(TraceStep(index=len(steps), observation="A room.", action=action, result=result, valid=valid))

    search = CAP if chance.random() < lost else chance.randint(3, 25)
    for _ in range(search):
        act(f"search box{chance.randint(1, 30)}")
    success = False
    if search < CAP:
        act("take key")
        if chance.random() < refused:
            act("take coin", "Your hands are full.", valid=False)
        if chance.random() < mistake:
            act("put key in chest", "The key breaks.")
            while len(steps) < CAP:
                act(f"search box{chance.randint(1, 30)}")
        else:
            act("open chest")
            for _ in range(chance.randint(0, 2)):
                act("look chest")
            act("put key in chest")
            success = True
    return Trajectory(
        source=f"test#{seed}", world="w", grammar="g", task=str(seed), task_type=kind, goal="Put the key in the chest.",
        success=success, score=float(success), steps=tuple(steps),
    )  # fmt: skip


def principle(trigger: str, requirement: str, task_type: str = "") -> PrincipleItem:
    return PrincipleItem.model_validate(
        {
            "world": "w",
            "grammar": "g",
            "task_type": task_type,
            "condition": "c",
            "guidance": "g",
            "predicate": {"trigger": trigger, "requirement": requirement},
        }
    )
