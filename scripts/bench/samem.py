"""What a table of state-thought values learns of ALFWorld by itself: no language model, no gradient.

    scripts/bench/samem.sh

The agent's thoughts are its admissible actions with roles for names, its states the deterministic summaries
(memory/summary.py). ALFWorld: it plays 5 training games of each of the six types (30), n times over; after every six
games it learns from all episodes so far (replay). After n = 1, 3 and 9 passes it plays the test games
(``alfworld/valid_seen``; the paper's own split is the unseen one) with epsilon 0, 50 steps each, on a table learnt from
the same episodes without the optimism of exploration. "n passes" is our reading of the paper's n. ``--world
scienceworld``: 3 variations of each of the 30 tasks, n = 1 and 3, at most 64 candidate actions a step, tested on
``scienceworld/strict-175``. Arms:

    table      recalls by the learnt values
    shuffled   the same table with its values permuted over all tried thoughts
    no table   a random thought, then a random action that it stands for
    random     a random action

``--store action`` values the actions as they are (``both``: one after the other). Written to runs/samem-WORLD/: the
episodes, ``result.json``, ``learning.png``. An interrupted run goes on: finished episodes are not played again, and the
table is learnt anew from them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Protocol:
    """``games``: training games of each type of task; ``passes``: after which is tested; ``batch``: episodes between
    two barriers; ``max_actions``: candidates of a step (of more, so many evenly spread in alphabetical order)."""

    spec: dict[str, Any]
    train: str
    test: str
    games: int
    passes: tuple[int, ...]
    batch: int
    max_actions: int


WORLDS = {
    "alfworld": Protocol(
        {"name": "alfworld", "max_steps": 50}, "alfworld/train", "alfworld/valid_seen", 5, (1, 3, 9), 6, 200
    ),
    "scienceworld": Protocol(
        {"name": "scienceworld", "max_steps": 50, "simplification": "easy"},
        "scienceworld/train",
        "scienceworld/strict-175",
        3,
        (1, 3),
        6,
        64,
    ),
}
SETTINGS = {
    "lifted": True,
    "threshold": 0.9999,  # only equal summaries are one state
    "thought_threshold": 1.0,
    "embedder": {"kind": "hashing"},
    "initial": 0.5,
    "gamma": 0.8,
    "alpha": 0.3,
    "sweeps": 8,
    "transfer": 0.9,
    "analogy": True,
    "forget_idle": True,
    "positive_only": True,
    "no_repeats": True,
    "judge": "none",
    "epsilon_start": 0.1,
    "epsilon_end": 0.02,
    "epsilon_episodes": 200,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--world", choices=tuple(WORLDS), default="alfworld")
    parser.add_argument("--types", type=int, help="only the first so many types of tasks")
    parser.add_argument("--store", choices=("thought", "action", "both"), default="thought")
    parser.add_argument("--test", help="other test games than the world's")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.out = args.out or Path("runs") / f"samem-{args.world}"
    args.out.mkdir(parents=True, exist_ok=True)
    stores = ("thought", "action") if args.store == "both" else (args.store,)
    results: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        for store in stores:
            results += asyncio.run(run(args, store, seed))
            write(args.out, results)
    report(results)
    draw(results, args.out / "learning.png")
    print(args.out / "result.json")
    return 0


async def run(args: argparse.Namespace, store: str, seed: int) -> list[dict[str, Any]]:
    """Learn with one seed, and test after the passes of PASSES."""
    from envs.pool import EnvPool
    from envs.tasksets import load_task_set, per_type
    from memory.embedding import make_embedder
    from memory.qlearning import epsilon_at
    from memory.qtable import QTable
    from memory.samem_settings import SamemSettings
    from train.agent import Job, RandomPlayer
    from train.ingest import trajectory_of
    from train.samem_player import LiftedLearner, SamemPlayer

    protocol = WORLDS[args.world]
    spec = protocol.spec
    settings = SamemSettings.model_validate({**SETTINGS, "store": store})
    learner = LiftedLearner(QTable(settings, make_embedder(settings.embedder)))
    training = load_task_set(protocol.train, spec)
    types = sorted({task.type for task in training})[: args.types]
    by_type = [per_type([task for task in training if task.type == name], protocol.games) for name in types]
    games = [of_type[number] for number in range(protocol.games) for of_type in by_type if number < len(of_type)]
    tests = [task for task in load_task_set(args.test or protocol.test, spec) if task.type in types]
    folder = args.out / f"{store}-{seed}"
    common: dict[str, int] = {"run_seed": seed, "max_actions": protocol.max_actions}
    rows: list[dict[str, Any]] = []

    async with EnvPool(spec, workers=1, envs_per_worker=protocol.batch, recycle_after=400, timeout_s=120.0) as pool:

        async def test(arm: str, passes: int, player: Callable[[Any], Any]) -> None:
            phase = f"test-{arm}-{passes}".replace(" ", "-")
            jobs = [Job(f"{phase}/{number:04d}", phase, task, seed) for number, task in enumerate(tests)]
            episodes = await play(pool, player, jobs, folder, protocol)
            rows.append({"store": store, "seed": seed, "arm": arm, "n": passes, **figures(episodes)})
            row = rows[-1]
            print(f"{store} {seed} n={passes} {arm}: {100 * row['success']:.1f} %", file=sys.stderr)

        if store == "thought":
            await test("random", 0, lambda job: RandomPlayer(hash_of(job)))
        await test("no table", 0, lambda job: SamemPlayer(job, None, learner.words, settings, **common))
        played = 0
        for passes in range(1, max(protocol.passes) + 1):
            for start in range(0, len(games), protocol.batch):
                phase = f"train-{passes:02d}-{start:02d}"
                batch = games[start : start + protocol.batch]
                jobs = [Job(f"{phase}/{number}", phase, task, seed) for number, task in enumerate(batch)]
                snapshot, words = learner.table.snapshot(), learner.words
                epsilon = epsilon_at(played, settings.epsilon_start, settings.epsilon_end, settings.epsilon_episodes)

                def explorer(
                    job: Any, snapshot: Any = snapshot, words: Any = words, epsilon: float = epsilon
                ) -> SamemPlayer:
                    return SamemPlayer(job, snapshot, words, settings, epsilon=epsilon, training=True, **common)

                episodes = await play(pool, explorer, jobs, folder, protocol)
                learner.learn([trajectory_of(episode, folder.name, passes) for episode in episodes])
                played += len(batch)
            if passes in protocol.passes:
                settled = learner.settled()
                now = settled.snapshot()
                for arm, snapshot in (("table", now), ("shuffled", now.shuffled(seed))):

                    def tester(job: Any, snapshot: Any = snapshot) -> SamemPlayer:
                        return SamemPlayer(job, snapshot, learner.words, snapshot.table.settings, **common)

                    await test(arm, passes, tester)
                rows[-2] |= {"states": len(settled.states), "thoughts": len(settled.thoughts)}
    return rows


async def play(pool: Any, player: Callable[[Any], Any], jobs: list[Any], folder: Path, protocol: Protocol) -> list[Any]:
    from train.rollouts import collect

    phase = jobs[0].phase
    file = folder / "episodes" / f"{phase}.jsonl.gz"
    return await collect(
        pool,
        player,
        jobs,
        max_steps=protocol.spec["max_steps"],
        concurrency=protocol.batch,
        file=file,
        description=phase,
    )


def figures(episodes: list[Any]) -> dict[str, Any]:
    from train.metrics import summarise

    found = summarise(episodes)
    keys = ("success", "success_interval", "score", "steps", "spl", "repeated_rate", "faults")
    by_type = {name: group["success"] for name, group in found["by_type"].items()}
    return {**{key: found[key] for key in keys}, "by_type": by_type, "episodes": len(episodes)}


def hash_of(job: Any) -> int:
    from train.agent import call_seed

    return call_seed(job.seed, job.id, 0)


def write(out: Path, results: list[dict[str, Any]]) -> None:
    scratch = out / "result.tmp"
    scratch.write_text(json.dumps({"settings": SETTINGS, "rows": results}, indent=1) + "\n")
    os.replace(scratch, out / "result.json")


def grouped(results: list[dict[str, Any]]) -> dict[tuple[str, str, int], list[dict[str, Any]]]:
    found: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in results:
        found.setdefault((row["store"], row["arm"], row["n"]), []).append(row)
    return found


def mean(rows: list[dict[str, Any]], key: str) -> float:
    return sum(row[key] or 0.0 for row in rows) / len(rows)


def report(results: list[dict[str, Any]]) -> None:
    from rich.console import Console

    from train.tables import compact_table, percent

    types = sorted({name for row in results for name in row["by_type"]})
    types = types if len(types) < 8 else []
    columns = (
        "store",
        "arm",
        "n",
        "success %",
        "score",
        "steps",
        "SPL",
        *(name.removeprefix("pick_")[:9] for name in types),
    )
    table = compact_table("SAMem alone", columns, left=("store", "arm"))
    for (store, arm, passes), rows in grouped(results).items():
        shares = [sum(row["by_type"][name] for row in rows) / len(rows) for name in types]
        table.add_row(
            store,
            arm,
            str(passes) if passes else "",
            percent(mean(rows, "success")),
            f"{mean(rows, 'score'):.3f}",
            f"{mean(rows, 'steps'):.1f}",
            f"{mean(rows, 'spl'):.2f}",
            *map(percent, shares),
        )
    Console(width=130).print(table)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Success over n: the table, the shuffled one, and the agents without."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("no figure: pip install 'saga-agents[train]'", file=sys.stderr)
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for (store, arm, passes), rows in grouped(results).items():
        lines.setdefault((store, arm), []).append((passes, 100 * mean(rows, "success")))
    for (store, arm), points in lines.items():
        if points[0][0] == 0:
            axes.axhline(points[0][1], linestyle=":", color="grey", label=f"{arm} ({store})")
        else:
            axes.plot(*zip(*points, strict=True), marker="o", label=f"{arm} ({store})")
    axes.set_xlabel("passes over 30 training games")
    axes.set_ylabel("test games won, %")
    axes.set_ylim(bottom=-2)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
