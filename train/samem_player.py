"""SAMem alone: an agent without a language model, whose thoughts are admissible actions with roles for names."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from envs.base import StepResult
from envs.pool import Session
from memory.experience import Experience
from memory.qtable import QTable, Snapshot
from memory.recall import StateGuide
from memory.records import Trajectory
from memory.samem_settings import SamemSettings
from memory.summary import Tracker, Words
from memory.usage import MemoryUse
from train.agent import Job, Turn
from train.prompts import reply_text, thin
from train.samem import experiences
from train.trajectory import Context

SETTLING_SWEEPS = 40
"""Sweeps after which gamma has made of an initial value less than a tenth of a step's worth."""


class SamemPlayer:
    """Plays one episode: the recalled thought, else one at random; then one of the actions that the thought stands for,
    at random. No knowledge of verbs, task types or search orders: what it knows is in the table.

    Args:
        snapshot: None: plays at random among its thoughts.
        words: what the table's summariser knows.
        max_actions: candidate actions of a step; of more, so many evenly spread in alphabetical order.
    """

    agent = "samem"
    model = ""
    adapter = ""
    memory: MemoryUse | None = None

    def __init__(
        self,
        job: Job,
        snapshot: Snapshot | None,
        words: Words,
        settings: SamemSettings,
        *,
        epsilon: float = 0.0,
        training: bool = False,
        run_seed: int = 0,
        max_actions: int = 200,
    ) -> None:
        key = f"{run_seed}/{job.id}/{job.seed}"
        self._guide = (
            StateGuide(snapshot, settings, key, epsilon=epsilon, training=training) if snapshot is not None else None
        )
        self._random = Random(f"{key}/free")
        self._words = words
        self._settings = settings
        self._max_actions = max_actions
        self._tracker: Tracker | None = None
        self._last: tuple[str, str] | None = None  # thought, action
        self._seen: set[frozenset[str]] = set()

    async def act(self, session: Session, result: StepResult, step: int) -> Turn:
        admissible = thin(await session.admissible(), self._max_actions) or ["look"]
        if self._tracker is None:
            self._tracker = Tracker(self._words, result.goal, result.observation, self._settings.state_key)
        elif self._last is not None:
            thought, action = self._last
            self._tracker.played(action, result.observation, result.valid)
            if self._guide is not None and frozenset(admissible) in self._seen:
                self._guide.repeated(thought)
        self._seen.add(frozenset(admissible))
        actions: dict[str, list[str]] = {}
        for action in admissible:
            thought = self._tracker.lift(action) if self._settings.store == "thought" else action
            actions.setdefault(thought, []).append(action)
        state = self._tracker.summary(admissible)
        thought = ""
        recall = None
        if self._guide is not None:
            recall = self._guide.recall(state, list(actions))
            thought = recall.thought
            recall = self._guide.followed(recall, thought)
        if not thought:
            thought = self._random.choice(sorted(actions))
        action = self._random.choice(actions[thought])
        self._last = thought, action
        return Turn(reply_text(action, thought), thought, action, admissible, recall=recall, state=state)

    def contexts(self) -> list[Context]:
        return []

    def release(self) -> None:
        return None


class LiftedLearner:
    """A table with ``lifted`` settings that learns from such an agent's episodes, and the words that it is learnt with.

    At each barrier all episodes so far are replayed. While the words grow, summaries change: the table is then learnt
    anew from all episodes.
    """

    def __init__(self, table: QTable) -> None:
        self.words = Words()
        self.table = table
        self._batches: list[list[Trajectory]] = []
        self._learnt: list[list[Experience]] = []

    def learn(self, batch: Sequence[Trajectory]) -> None:
        """Learn from the episodes since the last barrier."""
        self._batches.append(list(batch))
        words = Words.learn(batch).joined(self.words)
        todo = self._batches[-1:]
        if words != self.words:
            self.words, todo = words, self._batches
            self.table = self.table.empty()
            self._learnt = []
        for episodes in todo:
            found = list(experiences(episodes, self.words, self.table.settings))
            self.table.learn(found)
            self._learnt.append(found)
        self._replay(self.table)

    def settled(self) -> QTable:
        """The table to test with: learnt from the same episodes, but from initial values of 0 and without ``transfer``,
        so that nothing of the optimism that leads exploration is left in its values."""
        table = self.table.empty(initial=0.0, transfer=0.0, sweeps=SETTLING_SWEEPS)
        for found in self._learnt:
            table.learn(found)
        self._replay(table)
        return table

    def _replay(self, table: QTable) -> None:
        table.replay([experience for found in self._learnt for experience in found])
