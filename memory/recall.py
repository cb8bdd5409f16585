"""SAMem in one episode: the state of the history comes in, the recalled thought goes out.

:class:`StateGuide` serves one episode on one snapshot. It knows neither who plays nor in which world.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from memory.qlearning import best_in_training, best_tried, epsilon_at
from memory.qtable import Snapshot
from memory.samem_settings import SamemSettings
from memory.summary import Words
from memory.usage import Recall


@dataclass(frozen=True)
class StateMemory:
    """What the episodes of a phase share: a table between two barriers, the words that its summariser knows, and the
    settings of its use.

    ``provenance``: (world, task) of the trajectories that the table has learnt from.
    """

    snapshot: Snapshot
    words: Words
    settings: SamemSettings
    provenance: frozenset[tuple[str, str]] = frozenset()

    def guide(self, key: str, *, training: bool) -> StateGuide:
        """For one episode (see :class:`StateGuide`). In training epsilon falls with the episodes learnt so far."""
        own = self.settings
        epsilon = epsilon_at(self.snapshot.episodes, own.epsilon_start, own.epsilon_end, own.epsilon_episodes)
        return StateGuide(self.snapshot, own, key, epsilon=epsilon if training else 0.0, training=training)


class StateGuide:
    """Recalls thoughts for one episode.

    Args:
        settings: of its use.
        key: of the episode: with the seed it fixes every random choice.
        epsilon: chance of a free choice instead of a recalled thought; 0 in tests.
        training: never-tried thoughts and the optimistic bonus count (see :mod:`memory.qlearning`); a positive value is
            not asked for.
    """

    def __init__(
        self, snapshot: Snapshot, settings: SamemSettings, key: str, *, epsilon: float = 0.0, training: bool = False
    ) -> None:
        self._snapshot = snapshot
        self._settings = settings
        self._epsilon = epsilon
        self._training = training
        self._random = Random(key)
        self._asked: int | str = ""
        self._tired: set[tuple[int | str, str]] = set()

    def recall(self, summary: str, options: Sequence[str] | None = None) -> Recall:
        """The thought for a state; "" where there is none to go by, or where the agent shall think for itself.

        Args:
            options: the thoughts that can be had now; None: any that the state knows.
        """
        state, similarity = self._snapshot.find_state(summary)
        self._asked = summary if state is None else state
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
        candidates = [
            candidate
            for candidate in self._snapshot.candidates(state, options, summary)
            if (self._asked, candidate.text) not in self._tired
        ]
        if self._training:
            place = best_in_training(candidates, self._settings.bonus, self._random)
        else:
            above = self._settings.initial if self._settings.positive_only else -math.inf
            place = best_tried(candidates, above)
        if place is None:
            return found
        chosen = candidates[place]
        return found.model_copy(update={"thought": chosen.text, "value": chosen.value, "visits": chosen.visits})

    def repeated(self, thought: str) -> None:
        """Tell that ``thought``, in the state that was last asked about, brought nothing new: an answer, or a choice of
        actions, that the episode had seen before."""
        if self._settings.no_repeats:
            self._tired.add((self._asked, thought))

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
