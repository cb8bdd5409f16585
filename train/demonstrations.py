"""Expert episodes for the warm start: they search as an agent must, and some show how to mend a mistake."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from envs.base import StepResult
from envs.pool import Session
from train.agent import Job, Turn, call_seed, listed_actions, start_conversation
from train.config import AgentConfig
from train.prompts import admissible_suffix, reply_text
from train.tokens import Codec
from train.trajectory import Context

MISTAKE_SHARE = 0.25
"""Chance of a mistake before each expert move of a recovery episode."""

AFTER_MISTAKE = "That did not work. "
"""Begins the thought of the move that mends a mistake."""


class DemonstrationPlayer:
    """The world's expert, speaking in the policy's form, so that its episodes are training rows.

    Args:
        recovery: insert actions that the world refuses, each followed by the expert's own move. The policy sees them
            in its context; they are masked in the loss.
    """

    agent = "expert"
    model = ""
    adapter = "expert"
    memory = None

    def __init__(self, codec: Codec, job: Job, config: AgentConfig, *, recovery: bool, run_seed: int) -> None:
        self._config = config
        self._conversation = start_conversation(codec, job.task.env, config)
        self._random = random.Random(call_seed(run_seed, job.id, 0))
        self._recovery = recovery
        self._failed = False
        self._seen: list[str] = []

    async def act(self, session: Session, result: StepResult, step: int) -> Turn:
        listed = await listed_actions(session, self._config)
        tokens = len(self._conversation.user(result.observation, admissible_suffix(listed)))
        move = await session.expert()
        action, thought = move.action, move.thought
        mistake = None
        if self._recovery and not self._failed and self._random.random() < MISTAKE_SHARE:
            mistake = mistaken_action(move.action, self._seen, await session.admissible(), self._random)
        if mistake is not None:
            action = mistake
        elif self._failed and thought:
            thought = AFTER_MISTAKE + thought
        self._failed = mistake is not None
        self._seen.append(move.action)
        if not self._config.thoughts:
            thought = ""
        text = reply_text(action, thought or None)
        self._conversation.demonstrate(text, step, trained=mistake is None)
        return Turn(text, thought or None, action, listed, tokens)

    def contexts(self) -> list[Context]:
        return self._conversation.contexts

    def release(self) -> None:
        return None


def mistaken_action(
    action: str, earlier: Sequence[str], admissible: Sequence[str], generator: random.Random
) -> str | None:
    """An action like ``action`` that the world refuses now, or None.

    Two kinds, those that small models make: a number counted past what exists, and an action from another situation.
    """
    allowed = set(admissible)
    counted = [
        f"{action[: found.start()]}{int(found.group()) + step}{action[found.end() :]}"
        for found in re.finditer(r"\d+", action)
        for step in (1, 2, 3)
    ]
    choices = [item for item in [*counted, *earlier] if item not in allowed and item != action]
    return generator.choice(choices) if choices else None
