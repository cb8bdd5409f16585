"""A run of two episodes in the vault of :mod:`tests.vault`, with a memory that took one of them in: for the browser."""

from __future__ import annotations

from pathlib import Path

from memory.embedding import HashingEmbedder
from memory.experience import Experience, Visit
from memory.qtable import QTable
from memory.records import Evidence, Link
from memory.samem_settings import SamemSettings
from memory.samem_store import save_barrier
from memory.store import LedgerEntry, Store
from memory.usage import Check, Instantiation, MemoryUse, Recall, Regulation, Retrieved
from tests.vault import PRINCIPLE as VAULT_PRINCIPLE
from tests.vault import PROCEDURE as VAULT_PROCEDURE
from tests.vault import episode
from train.ingest import trajectory_of
from train.trajectory import Episode, Step, append_episode

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>"
"""What a model or a world may write."""

NAME = "demo"

# The forms of this run's actions go by the name of its world.
PRINCIPLE = VAULT_PRINCIPLE.model_copy(update={"grammar": "vault"})
PROCEDURE = VAULT_PROCEDURE.model_copy(update={"grammar": "vault"})


def played(number: int) -> Episode:
    """Two steps; at the first one the memory objected to what was proposed, and values recalled a thought."""
    use = MemoryUse(
        mode="full",
        snapshot="s-0123456789abcdef",
        plan="find the lever",
        retrieved=(
            Retrieved(
                item=PRINCIPLE.id, level=3, status="audited", similarity=0.5, task_type=0.3, utility=0, score=0.8
            ),
            Retrieved(
                item=PROCEDURE.id, level=2, status="candidate", similarity=0.2, task_type=0, utility=0, score=0.2
            ),
        ),
        instantiations=(
            Instantiation(item=PRINCIPLE.id, text="When a lever is in sight: pull it first."),
            Instantiation(item=PROCEDURE.id, reason="over the token budget"),
        ),
        text="From earlier games. " + HOSTILE,
        tokens=12,
    )
    regulation = Regulation(
        proposals=("enter door", "pull lever"),
        checks=(
            Check(item=PRINCIPLE.id, attempt=0, outcome="violated"),
            Check(item=PRINCIPLE.id, attempt=1, outcome="followed"),
        ),
        choice="resampled",
    )
    recall = Recall(
        snapshot="q-0123456789abcdef", state=0, similarity=0.99, thought="pull it", value=0.125, visits=1, mode="hint",
        followed=True,
    )  # fmt: skip
    steps = [
        Step(
            index=0, observation="You are in a vault.", text="x", thought=HOSTILE, action="pull lever", result="Click.",
            regulation=regulation, recall=recall,
        ),
        Step(
            index=1, observation="Click.", text="x", action="enter door", result="The door is open now. " + "w" * 300,
            reward=1.0, done=True,
        ),
    ]  # fmt: skip
    return Episode(
        id=f"grpo-0001/{number:03d}-0", phase="grpo-0001", env="vault", task=f"task-{number}", task_type="open", seed=0,
        goal=f"Get in. {HOSTILE}", model="m", won=number == 0, score=float(number == 0), memory=use, steps=steps,
    )  # fmt: skip


def write_run(folder: Path) -> Path:
    """The run's folder with its episodes and its memory."""
    run = folder / NAME
    run.mkdir()
    (run / "config.yaml").write_text(f"run: {{name: {NAME}}}\n")
    for number in range(2):
        append_episode(run / "episodes" / "grpo-0001.jsonl.gz", played(number))
    of = trajectory_of(played(0), NAME)
    told = episode(of)
    ends = [
        (PROCEDURE.id, PRINCIPLE.id, 0, "Click."),
        (told.id, PROCEDURE.id, 1, "The door is open"),
        (of.id, told.id, 1, ""),
    ]
    links = [
        Link(lower=lower, upper=upper, evidence=(Evidence(trajectory=of.id, step=step, quote=quote),))
        for lower, upper, step, quote in ends
    ]
    with Store(f"sqlite:///{run / 'memory.db'}") as store:
        store.add_trajectories([of])
        store.write([PRINCIPLE, PROCEDURE, told], links)
        store.set_status(PRINCIPLE.id, "audited", "audit: passed on 2 steps")
        check = {"name": "direction", "state": "passed", "estimate": 0.5, "low": 0.25, "high": 0.75, "k": 1, "n": 2}
        verdict = {"decision": "passed", "reason": "", "checks": [check | {"note": HOSTILE}]}
        store.judge(PRINCIPLE.id, "audit", verdict)
        store.judge(
            PRINCIPLE.id, "harm", {"harmful": True, "reason": HOSTILE, "cited": [{"trajectory": of.id, "step": 1}]}
        )
        store.credit([LedgerEntry(PRINCIPLE.id, "run:demo/x", 1.0, retrieved=1, instantiated=1)])
        table = QTable(SamemSettings(alpha=0.5, gamma=0.5, threshold=0.99), HashingEmbedder())
        visits = (
            Visit(step=0, state=f"before the vault {HOSTILE}", thought="pull it", rewards=(0.0,)),
            Visit(step=1, state="a door stands open", thought=HOSTILE, rewards=(1.0,)),
        )
        save_barrier(store, table, table.learn([Experience(of.id, "0", visits)]), None)
    return run
