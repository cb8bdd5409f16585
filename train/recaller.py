"""SAMem in one episode of a language model: the history as states, what is recalled for them, what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from envs.base import StepResult
from memory.recall import StateMemory
from memory.summary import Tracker
from memory.usage import Recall
from train.prompts import recall_suffix, thought_opening


@dataclass(frozen=True)
class Look:
    """What an agent has of the table before it replies.

    ``hint``: follows the observation. ``opening``: begins the reply. ``action``: is played as it is.
    """

    state: str = ""
    recall: Recall | None = None
    hint: str = ""
    opening: str = ""
    action: str = ""


class Recaller:
    """Goes through an episode with the agent: :meth:`look` before each reply, :meth:`replied` after it.

    Args:
        key: of the episode, fixes every random choice.
        training: epsilon decides between a recalled and a free thought; else it is always recalled.
    """

    def __init__(self, memory: StateMemory, key: str, *, training: bool) -> None:
        self._memory = memory
        self._settings = memory.settings
        self._guide = memory.guide(key, training=training)
        self._tracker: Tracker | None = None
        self._seen: set[str] = set()
        self._action: str | None = None
        self._said = ""

    def look(self, result: StepResult, admissible: Sequence[str] | None) -> Look:
        """The state, and what is recalled for it.

        Args:
            result: the world's latest. admissible: the actions that the agent is shown, None where it is shown none.

        Raises:
            EmbeddingFault: the state has no vector.
        """
        if self._tracker is None:
            self._tracker = Tracker(self._memory.words, result.goal, result.observation, self._settings.state_key)
        else:
            self._tracker.played(self._action, result.observation, result.valid)
            if result.observation in self._seen:
                self._guide.repeated(self._said)
        self._seen.add(result.observation)
        state = self._tracker.summary(admissible)
        valued = self._settings.lifted or self._settings.store == "action"
        options = [self._valued("", action) for action in admissible] if valued and admissible else None
        recall = self._guide.recall(state, options)
        named = self._tracker.named(recall.thought) if self._settings.store == "thought" else recall.thought
        shown = " ".join(named.split())
        recall = recall.model_copy(update={"shown": shown})
        if self._settings.recall == "hint":
            return Look(state, recall, hint=recall_suffix(shown))
        if self._settings.store == "action":
            return Look(state, recall, action=shown)
        return Look(state, recall, opening=thought_opening(shown))

    def replied(self, recall: Recall | None, thought: str | None, action: str | None) -> Recall | None:
        """``recall`` with whether the agent's thought and action followed it. Raises EmbeddingFault."""
        self._action = action
        self._said = self._valued(thought or "", action)
        return None if recall is None else self._guide.followed(recall, self._said)

    def _valued(self, thought: str, action: str | None) -> str:
        """What of a reply the table values."""
        assert self._tracker is not None  # look comes first
        if self._settings.store == "action":
            return action or ""
        if self._settings.lifted:
            return self._tracker.lift(action) if action else ""
        return " ".join(self._tracker.lettered(thought).split())
