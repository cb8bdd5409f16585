"""What three rounds of memory bring an expert with mistakes on generated households: no memory, shuffled, full.

    scripts/bench/memory_rounds.sh

Each round plays training games with the memory so far, adds them to the store, has the offline builder build and the
audit judge, and then plays the frozen evaluation games in three arms with the same store: ``none``, ``shuffled`` (the
control of equal length and frequency) and ``full``. The agent (tests/scripted_agents.py) obeys any constraint that it
can read, so that only the content can make a difference. Written to runs/memory-rounds/: ``memory.db``, the episodes,
and ``result.json``.

    success      share of games won
    wasted       share of the turns that were refused, or repeated an action with the same answer as before
    difference   full less another arm, paired by game: mean and 95 % interval of the bootstrap over games

Exit code 1: after the last round an interval of full against one of the others does not lie on the right side of zero.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ARMS = ("none", "shuffled", "full")
MAX_STEPS = {"easy": 12, "medium": 20}
EVALUATIONS = {"easy": "household/easy/eval-48", "medium": "household/medium/eval-102"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--games", type=int, default=150, help="training games a round")
    parser.add_argument("--level", choices=tuple(EVALUATIONS), default="medium", help="of the households")
    parser.add_argument("--seeds", type=int, default=1, help="repetitions of each evaluation game")
    parser.add_argument("--embedder", choices=("minilm", "hashing"), default="minilm")
    parser.add_argument("--out", type=Path, default=Path("runs/memory-rounds"))
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    started = time.perf_counter()
    rounds = asyncio.run(run(args))
    result = {"seconds": time.perf_counter() - started, "level": args.level, "games": args.games, "rounds": rounds}
    (args.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    report(rounds)
    print(f"{args.out / 'result.json'}, {result['seconds']:.0f} s")
    return 0 if holds(rounds[-1]) else 1


async def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    from envs.pool import EnvPool
    from envs.tasksets import load_task_set
    from memory.predicates import PredicateHost
    from memory.store import Store
    from train.agent import Job

    spec = {"name": "household", "max_steps": MAX_STEPS[args.level]}
    evaluation = load_task_set(EVALUATIONS[args.level], spec)
    rounds = []
    # A busy machine shall not change what is judged: a check may take a second here.
    with Store(f"sqlite:///{args.out}/memory.db") as store, PredicateHost(deadline=1.0) as host:
        async with EnvPool(spec, workers=1, envs_per_worker=8, recycle_after=300, timeout_s=60.0) as pool:
            for number in range(1, args.rounds + 1):
                first = (number - 1) * args.games
                tasks = load_task_set(f"household/{args.level}/train:{first}-{first + args.games - 1}", spec)
                phase = f"collect-{number}"
                jobs = [Job(f"{phase}/{i:04d}", phase, task, 0) for i, task in enumerate(tasks)]
                mode = "none" if number == 1 else "full"
                collected = await play(args, pool, store, host, jobs, mode)
                learnt = learn(args, store, host, collected, number)
                arms = {}
                for arm in ARMS:
                    phase = f"eval-{number}-{arm}"
                    jobs = [
                        Job(f"{phase}/{seed}-{i:04d}", phase, task, seed)
                        for seed in range(args.seeds)
                        for i, task in enumerate(evaluation)
                    ]
                    arms[arm] = figures(await play(args, pool, store, host, jobs, arm))
                rounds.append({"round": number, "learnt": learnt, "arms": arms, "differences": differences(arms)})
    return rounds


async def play(args: argparse.Namespace, pool: Any, store: Any, host: Any, jobs: list[Any], mode: str) -> list[Any]:
    """The episodes of ``jobs``. Collected ones are credited to the memory's ledgers, evaluation games are not."""
    from memory.embedding import make_embedder
    from memory.guide import Memory
    from memory.settings import EmbedderSettings, MemorySettings, RetrievalSettings
    from tests.scripted_agents import MistakenExpert, Rates
    from train.ingest import GRAMMARS
    from train.memory import episode_ledger
    from train.rollouts import collect

    memory = None
    if mode != "none":
        settings = MemorySettings(
            mode=mode,
            retrieval=RetrievalSettings(episodes=0, procedures=1, principles=10),
            embedder=EmbedderSettings(kind=args.embedder),
        )
        embedder = make_embedder(settings.embedder, args.out / "vectors.db")
        memory = Memory(store, settings, grammar=GRAMMARS["household"], embedder=embedder, host=host)
    count: Callable[[str], int] = lambda text: len(text.split())  # noqa: E731

    def player(job: Any) -> MistakenExpert:
        return MistakenExpert(job, Rates(), memory.guide(job.id, count) if memory else None)

    phase = jobs[0].phase
    episodes = await collect(
        pool,
        player,
        jobs,
        max_steps=MAX_STEPS[args.level],
        concurrency=8,
        file=args.out / "episodes" / f"{phase}.jsonl.gz",
        description=phase,
    )
    if phase.startswith("collect"):
        store.credit([entry for episode in episodes for entry in episode_ledger(episode, args.out.name)])
    return episodes


def learn(args: argparse.Namespace, store: Any, host: Any, episodes: list[Any], number: int) -> dict[str, Any]:
    """Build from all that was collected, and let the audit decide what may block."""
    from memory.audit_store import audit_store
    from memory.builder_settings import BuilderSettings
    from memory.distil import distil
    from memory.embedding import make_embedder
    from memory.settings import EmbedderSettings
    from train.ingest import trajectory_of

    store.add_trajectories(trajectory_of(episode, "memory-rounds", number) for episode in episodes)
    embedder = make_embedder(EmbedderSettings(kind=args.embedder), args.out / "vectors.db")
    distil(store, BuilderSettings(), embedder, args.out / "builder", round=number)
    audit_store(store, host, round=number)
    principles = store.items(3)
    return {
        "trajectories": sum(1 for _ in store.trajectories()),
        "statuses": dict(Counter(stored.status for stored in principles)),
        "principles": [[stored.status, stored.item.text()] for stored in principles if stored.status != "retired"],
    }


def figures(episodes: list[Any]) -> dict[str, Any]:
    """Of an arm: success and wasted share, and both per game."""
    from train.metrics import repeated_actions

    won: dict[str, list[float]] = {}
    wasted: dict[str, list[float]] = {}
    for episode in episodes:
        won.setdefault(episode.task, []).append(float(episode.won))
        wasted.setdefault(episode.task, []).append(wasted_share(episode))
    regulated = [step.regulation for episode in episodes for step in episode.steps if step.regulation]
    turns = sum(len(episode.steps) for episode in episodes)
    return {
        "success": sum(map(sum, won.values())) / len(episodes),
        "wasted": sum(map(sum, wasted.values())) / len(episodes),
        "invalid": sum(episode.invalid_actions for episode in episodes) / turns,
        "repeated": sum(map(repeated_actions, episodes)) / turns,
        "steps": turns / len(episodes),
        "faults": sum(episode.status != "ok" for episode in episodes),
        "tokens": sum(episode.memory.tokens for episode in episodes if episode.memory) / len(episodes),
        "unjudged": sum(check.outcome == "unjudged" for regulation in regulated for check in regulation.checks),
        "objections": sum(regulation.choice != "original" for regulation in regulated) / turns,
        "won": won,
        "wasted_by_game": wasted,
    }


def wasted_share(episode: Any) -> float:
    """Share of the turns that the world refused, or that repeated an action after which it answers just the same."""
    seen: set[tuple[str | None, str]] = set()
    wasted = 0
    for step in episode.steps:
        key = (step.action, step.result)
        wasted += not step.valid or key in seen
        seen.add(key)
    return wasted / max(1, len(episode.steps))


def differences(arms: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Full less each other arm: (mean, low, high)."""
    from train.metrics import paired_bootstrap

    return {
        arm: {
            "success": list(paired_bootstrap(arms[arm]["won"], arms["full"]["won"])),
            "wasted": list(paired_bootstrap(arms[arm]["wasted_by_game"], arms["full"]["wasted_by_game"])),
        }
        for arm in ARMS[:-1]
    }


def holds(last: dict[str, Any]) -> bool:
    return all(found["success"][1] > 0 > found["wasted"][2] for found in last["differences"].values())


def report(rounds: list[dict[str, Any]]) -> None:
    from rich.console import Console

    from train.tables import compact_table, percent

    columns = (
        "round",
        "arm",
        "success %",
        "full - arm % (95 %)",
        "wasted %",
        "full - arm % (95 %)",
        "objections %",
        "words",
    )
    table = compact_table("memory in rounds, generated households", columns, left=("arm",))
    for entry in rounds:
        for arm in ARMS:
            row = entry["arms"][arm]
            found = entry["differences"].get(arm, {})
            table.add_row(
                str(entry["round"]),
                arm,
                percent(row["success"]),
                difference_text(found.get("success")),
                percent(row["wasted"]),
                difference_text(found.get("wasted")),
                percent(row["objections"]),
                f"{row['tokens']:.0f}",
            )
    Console(width=130).print(table)
    last = rounds[-1]["learnt"]
    print(f"principles after {last['trajectories']} episodes: {last['statuses']}")


def difference_text(found: list[float] | None) -> str:
    if not found:
        return ""
    mean, low, high = (100 * value for value in found)
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
