"""The arms of a validation: who is shown what, how episodes are named and scored, and what the ledgers are told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from envs.base import Task
from memory.embedding import HashingEmbedder
from memory.guide import Memory
from memory.ledger import Ledger
from memory.records import PrincipleItem
from memory.settings import MemorySettings
from memory.store import Store
from memory.usage import Instantiation, MemoryUse
from memory.validation import Arm, Contender, Plan, Trial
from tests.vault import PRINCIPLE, hierarchy, trajectory
from train.agent import Job
from train.trajectory import Episode
from train.trials import Trials

pytestmark = pytest.mark.unit

TASKS = {name: Task("vault", name, "vault") for name in ("a", "b")}
PLAN = Plan((Trial(Contender(PRINCIPLE.id, PRINCIPLE), ("a", "b")),), ("a", "b"), 2)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(f"sqlite:///{tmp_path}/memory.db") as store:
        of = trajectory()
        store.add_trajectories([of])
        assert store.write(*hierarchy(of)).rejected == []
        yield store


class Player:
    """Plays every job with the score that it is given, and notes who guided it."""

    def __init__(self, store: Store, scores: dict[str, float | None]) -> None:
        self.store, self.scores = store, scores
        self.arms: list[tuple[tuple[str, ...], str]] = []
        self.jobs: list[Job] = []
        self.playing = 0

    def memory(self, *, hidden: Sequence[str], tried: str) -> Memory:
        self.arms.append((tuple(hidden), tried))
        settings = MemorySettings(attempts=0)
        return Memory(
            self.store,
            settings,
            grammar="v1",
            embedder=HashingEmbedder(),
            host=None,
            hidden=hidden,
            tried=tried,
        )

    async def play(self, memory: Memory, jobs: list[Job]) -> list[Episode]:
        self.playing += 1
        assert self.playing == 1, "arms are played one after the other"
        await asyncio.sleep(0)
        self.playing -= 1
        self.jobs += jobs
        return [self.episode(memory, job) for job in jobs]

    def episode(self, memory: Memory, job: Job) -> Episode:
        score = self.scores[job.id.partition("/")[2]]
        shown = (Instantiation(item=memory.tried, text="do"),) if memory.tried else ()
        return Episode(
            id=job.id,
            phase=job.phase,
            env="vault",
            task=job.task.id,
            task_type="vault",
            seed=job.seed,
            group="",
            agent="policy",
            model="",
            adapter="",
            status="ok" if score is not None else "env_error",
            score=score or 0.0,
            memory=MemoryUse(mode="full", snapshot=memory.snapshot, instantiations=shown),
        )


def run(store: Store, scores: dict[str, float | None]) -> tuple[Player, list[Arm]]:
    player = Player(store, scores)
    before = store.item(PRINCIPLE.id).ledger
    trials = Trials(store, PLAN, TASKS, player.memory, player.play, round=3, run="night")

    async def main() -> list[Arm]:
        arms: list[PrincipleItem | None] = [None, PRINCIPLE]
        return await asyncio.gather(*(trials.run(arm, ["b", "a"], 2) for arm in arms))

    arms = asyncio.run(main())
    assert store.item(PRINCIPLE.id).ledger == before, "every arm sees the same memory"
    trials.credit()
    return player, arms


SCORES: dict[str, float | None] = {"0000-0": 1.0, "0000-1": -0.5, "0001-0": 0.25, "0001-1": None}


def test_each_task_has_its_samples_and_a_fault_counts_as_nothing(store: Store) -> None:
    player, (control, treated) = run(store, SCORES)
    assert control == Arm({"a": [1.0, 0.0], "b": [0.25, 0.0]}, shown=0.0)
    assert treated == Arm({"a": [1.0, 0.0], "b": [0.25, 0.0]}, shown=1.0)
    assert player.arms == [((PRINCIPLE.id,), ""), ((PRINCIPLE.id,), PRINCIPLE.id)]
    assert [(job.id, job.task.id, job.seed) for job in player.jobs[:3]] == [
        ("validate-3-control/0000-0", "a", 0),
        ("validate-3-control/0000-1", "a", 1),
        ("validate-3-control/0001-0", "b", 0),
    ]
    assert player.jobs[4].id == f"validate-3-{PRINCIPLE.id}/0000-0"


def test_the_ledger_learns_from_both_arms_and_only_once(store: Store) -> None:
    for _ in range(2):
        run(store, SCORES)
    # Three episodes of known outcome in each arm; the mean of 1, 0 and 1/4.
    assert store.item(PRINCIPLE.id).ledger == Ledger(
        retrieved=4,
        instantiated=4,
        episodes_with=3,
        outcome_with=pytest.approx(1.25 / 3),
        episodes_without=3,
        outcome_without=pytest.approx(1.25 / 3),
    )
