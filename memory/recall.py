"""SAMem in one episode: the state of the history comes in, the recalled thought goes out.

:class:`StateGuide` serves one episode on one snapshot. It knows neither who plays nor in which world.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from memory.qlearning import best_in_training, best_tried
from memory.qtable import Snapshot
from memory.samem_settings import SamemSettings
from memory.usage import Recall


class StateGuide:
    """Recalls thoughts for one episode.

    Args:
        key: of the episode: with the seed it fixes every random choice.
        epsilon: chance of a free choice instead of a recalled thought; 0 in tests.
        training: never-tried thoughts and the optimistic bonus count (see :mod:`memory.qlearning`).
    """

    def __init__(
        self, snapshot: Snapshot, settings: SamemSettings, key: str, *, epsilon: float = 0.0, training: bool = False
    ) -> None:
        self._snapshot = snapshot
        self._settings = settings
        self._epsilon = epsilon
        self._training = training
        self._random = Random(key)

    def recall(self, summary: str, options: Sequence[str] | None = None) -> Recall:
        """The thought for a state; "" where there is none to go by, or where the agent shall think for itself.

        Args:
            options: the thoughts that can be had now; None: any that the state knows.
        """
        state, similarity = self._snapshot.find_state(summary)
        explores = self._random.random() < self._epsilon
        found = Recall(
            snapshot=self._snapshot.id,
            state=state,
            similarity=round(similarity, 6),
            mode=self._settings.recall,
            explored=explores,
        )
        if explores:
            return found
        candidates = self._snapshot.candidates(state, options)
        if self._training:
            place = best_in_training(candidates, self._settings.bonus, self._random)
        else:
            place = best_tried(candidates, positive_only=self._settings.positive_only)
        if place is None:
            return found
        chosen = candidates[place]
        if self._settings.positive_only and chosen.value <= 0:
            return found
        return found.model_copy(update={"thought": chosen.text, "value": chosen.value, "visits": chosen.visits})

    def followed(self, recall: Recall, thought: str) -> Recall:
        """``recall`` with whether the agent's thought was the recalled one, or of one cluster with it."""
        if not recall.thought:
            return recall
        same = thought == recall.thought
        if not same and recall.state is not None:
            table = self._snapshot.table
            count = len(self._snapshot.values)
            one = table.find_thought(recall.state, recall.thought, count)
            same = one is not None and table.find_thought(recall.state, thought, count) == one
        return recall.model_copy(update={"followed": same})
