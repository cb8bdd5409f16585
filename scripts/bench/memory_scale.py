"""The memory at size: 100,000 episodes of 20 steps, with an episode record each, procedures and principles above them.

    python scripts/bench/memory_scale.py                       # a quarter of an hour on one core, 1.5 GB of disk
    python scripts/bench/memory_scale.py --episodes 10000      # a tenth
    python scripts/bench/memory_scale.py --store postgresql://user@host/empty_database

The texts are made up by seed: household-like observations of 60 to 100 words, so that they compress about as real
ones do. Each part runs in a process of its own, on one core:

    write      trajectories (ingest), then their episode records, procedures, principles and links, each checked against
               its evidence; only the store's work is timed, not the making of texts
    read       trace of principles down to the steps and of steps up, median and 95th percentile; snapshot; provenance
    retrieve   what an agent does at the start of an episode: embed task and plan (MiniLM), search three levels. The
               vectors of the stored texts are sums of word vectors: real ones would take MiniLM ten minutes to make,
               and cost the same to search

Columns: elapsed and CPU time; on a machine with other load the second tells more. Memory is the process's peak resident
size. Exit code 1: a goal is missed (ingest 2,000 steps/s elapsed; of CPU time: trace 50 ms at the 95th percentile,
retrieval 20 ms at the median).
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STEPS = 20
BATCH = 500
EPISODES_A_PROCEDURE = 500
PROCEDURES_A_PRINCIPLE = 4
CITED = 20
"""Steps that a principle's link cites."""

PLACES = [
    "cabinet",
    "drawer",
    "shelf",
    "countertop",
    "fridge",
    "microwave",
    "sinkbasin",
    "desk",
    "sidetable",
    "sofa",
    "bed",
    "dresser",
    "safe",
]
THINGS = [
    "apple",
    "knife",
    "mug",
    "plate",
    "book",
    "pen",
    "cloth",
    "soap",
    "vase",
    "laptop",
    "pillow",
    "watch",
    "statue",
    "box",
    "egg",
    "pan",
    "bread",
]
TYPES = ("pick", "look", "clean", "heat", "cool", "pick two")


def made_up_trajectory(number: int) -> Any:
    from memory.records import TraceStep, Trajectory

    rng = random.Random(number)

    def some(words: Sequence[str], count: int) -> str:
        return ", ".join(f"a {rng.choice(words)} {rng.randint(1, 20)}" for _ in range(count))

    thing, place = rng.choice(THINGS), rng.choice(PLACES)
    goal = f"put some {thing} on {place} {rng.randint(1, 9)}."
    observation = f"You are in the middle of a room. Looking around you, you see {some(PLACES, 20)}. Your task: {goal}"
    steps = []
    for index in range(STEPS):
        where = f"{rng.choice(PLACES)} {rng.randint(1, 20)}"
        result = f"You arrive at {where}. On the {where}, you see {some(THINGS, rng.randint(1, 12))}."
        thought = f"I need to find a {thing}. It is likely to be in {some(PLACES, 3)}."
        step = TraceStep(
            index=index, observation=observation, thought=thought, action=f"go to {where}", result=result, valid=True
        )
        steps.append(step)
        observation = result
    return Trajectory(
        source=f"bench#{number}",
        world="bench",
        grammar="v1",
        task=f"task-{number // 8}",
        task_type=TYPES[number % len(TYPES)],
        goal=goal,
        agent="bench",
        success=number % 3 == 0,
        score=float(number % 3 == 0),
        steps=tuple(steps),
    )


def told(trajectory: Any) -> tuple[Any, Any]:
    """The episode record of a trajectory, and the link between them."""
    from memory.records import EpisodeItem, Evidence, KeyStep, Link

    quotes = [trajectory.steps[index].result.split(". ")[0] for index in (3, 11)]
    item = EpisodeItem(
        world="bench",
        grammar="v1",
        task_type=trajectory.task_type,
        trajectory=trajectory.id,
        goal=trajectory.goal,
        outcome="success" if trajectory.success else "failure",
        key_steps=tuple(KeyStep(step=step, what=quote) for step, quote in zip((3, 11), quotes, strict=True)),
    )
    evidence = tuple(
        Evidence(trajectory=trajectory.id, step=step, quote=quote) for step, quote in zip((3, 11), quotes, strict=True)
    )
    return item, Link(lower=trajectory.id, upper=item.id, evidence=evidence)


def write(url: str, episodes: int) -> dict[str, float]:
    from memory.records import Evidence, Link, PrincipleItem, ProcedureItem
    from memory.store import Store

    seconds = {"trajectories": 0.0, "records": 0.0}
    cpu = {"trajectories": 0.0, "records": 0.0}
    records = 0

    def timed(kind: str, call: Callable[[], Any]) -> Any:
        start, busy = time.perf_counter(), time.process_time()
        result = call()
        seconds[kind] += time.perf_counter() - start
        cpu[kind] += time.process_time() - busy
        return result

    with Store(url) as store:
        procedures: list[Any] = []
        cited: list[list[Any]] = []
        for first in range(0, episodes, BATCH):
            batch = [made_up_trajectory(number) for number in range(first, min(first + BATCH, episodes))]
            # Fresh objects, so that nothing that the making has worked out (ids) is already there.
            added = timed("trajectories", lambda batch=batch: store.add_trajectories(batch))
            assert added == len(batch)
            pairs = [told(trajectory) for trajectory in batch]
            number = first // EPISODES_A_PROCEDURE
            if number == len(procedures):
                rng = random.Random(-number - 1)
                procedure = ProcedureItem(
                    world="bench",
                    grammar="v1",
                    task_type=TYPES[number % len(TYPES)],
                    when=f"the task is number {number} and the {rng.choice(PLACES)} is shut",
                    steps=tuple(f"go to {rng.choice(PLACES)} {{{slot}}}" for slot in range(5)),
                )
                procedures.append(procedure)
                cited.append([])
            procedure = procedures[-1]
            up = [Link(lower=item.id, upper=procedure.id, evidence=link.evidence[:1]) for item, link in pairs]
            cited[-1] += [link.evidence[0] for _, link in pairs[:CITED]]
            items = [*(item for item, _ in pairs), procedure]
            links = [*(link for _, link in pairs), *up]
            report = timed("records", lambda items=items, links=links: store.write(items, links))
            assert not report.rejected, report.rejected[:3]
            records += len(report.accepted) + report.links
        principles, links = [], []
        for number in range(-(-len(procedures) // PROCEDURES_A_PRINCIPLE)):
            own = slice(number * PROCEDURES_A_PRINCIPLE, (number + 1) * PROCEDURES_A_PRINCIPLE)
            principle = PrincipleItem(
                world="bench",
                grammar="v1",
                condition=f"the task is of kind {number}",
                guidance="open what is shut first",
            )
            principles.append(principle)
            for procedure, evidence in zip(procedures[own], cited[own], strict=True):
                steps = tuple(Evidence(trajectory=item.trajectory, step=item.step) for item in evidence[:CITED])
                links.append(Link(lower=procedure.id, upper=principle.id, evidence=steps))
        report = timed("records", lambda: store.write(principles, links))
        assert not report.rejected, report.rejected[:3]
        records += len(report.accepted) + report.links
    return {
        "steps": episodes * STEPS,
        "ingest_steps_per_s": episodes * STEPS / seconds["trajectories"],
        "ingest_steps_per_cpu_s": episodes * STEPS / cpu["trajectories"],
        "records": records,
        "records_per_s": records / seconds["records"],
        "records_per_cpu_s": records / cpu["records"],
    }


Times = list[tuple[float, float]]
"""(seconds, CPU seconds) of each call."""


def spread(name: str, times: Times) -> dict[str, float]:
    """Median and 95th percentile in ms, elapsed and of CPU."""
    figures = {}
    for index, suffix in ((0, "ms"), (1, "cpu_ms")):
        ordered = sorted(1000 * time[index] for time in times)
        figures[f"{name}_{suffix}"] = statistics.median(ordered)
        figures[f"{name}_p95_{suffix}"] = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return figures


def each(call: Callable[[Any], Any], values: Sequence[Any]) -> Times:
    times = []
    for value in values:
        start, busy = time.perf_counter(), time.process_time()
        call(value)
        times.append((time.perf_counter() - start, time.process_time() - busy))
    return times


def read(url: str, episodes: int) -> dict[str, float]:
    from memory.store import Store
    from memory.trace import trace_down, trace_up

    rng = random.Random(0)
    with Store(url, create=False) as store:
        principles = [stored.id for stored in store.items(3)]
        steps = [(made_up_trajectory(rng.randrange(episodes)).id, rng.choice((3, 11))) for _ in range(200)]
        assert all(trace_up(store, *step).root.children for step in steps[:5])
        figures = {
            **spread("trace_down", each(lambda id: trace_down(store, id), rng.choices(principles, k=100))),
            **spread("trace_up", each(lambda step: trace_up(store, *step), steps)),
            **spread("trajectory", each(lambda step: store.trajectory(step[0]), steps)),
            **spread("snapshot", each(store.snapshot, ["first"])),
            **spread("snapshot_again", each(store.snapshot, ["second", "third"])),
        }
        figures["read_rss_mb"] = peak_mb()  # before provenance, which names every task
        figures |= spread("provenance", each(lambda _: store.provenance(), [0]))
    return figures


def retrieve(url: str, episodes: int) -> dict[str, float]:
    import faiss
    import numpy as np
    import torch

    from memory.embedding import MiniLMEmbedder, Vectors
    from memory.guide import Memory
    from memory.instantiate import Situation
    from memory.settings import MemorySettings
    from memory.store import Store

    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    words: dict[str, Vectors] = {}

    def word(text: str) -> Vectors:
        if text not in words:
            words[text] = np.random.default_rng(len(words)).standard_normal(MiniLMEmbedder.size).astype(np.float32)
        return words[text]

    class Sums:
        name = "sums of word vectors"

        def embed(self, texts: Sequence[str]) -> Vectors:
            if not texts:
                return np.zeros((0, MiniLMEmbedder.size), dtype=np.float32)
            found: Vectors = np.stack([np.sum([word(part) for part in text.split()], axis=0) for text in texts])
            return found / np.linalg.norm(found, axis=1, keepdims=True)

    rng = random.Random(0)
    asked = [made_up_trajectory(rng.randrange(episodes)) for _ in range(50)]
    situations = [
        Situation(goal=of.goal, observation=of.steps[0].observation, task_type=of.task_type, plan="find it, take it")
        for of in asked
    ]
    start, busy = time.perf_counter(), time.process_time()
    with Store(url, create=False) as store:
        # attempts=0: nothing is regulated here, so no worker process for predicates is needed
        memory = Memory(store, MemorySettings(attempts=0), grammar="v1", embedder=Sums(), host=None)
        loaded = {"load_s": time.perf_counter() - start, "load_cpu_s": time.process_time() - busy}
        search = each(memory.search, situations)
        memory.embedder = MiniLMEmbedder()
        memory.search(situations[0])  # loads the model
        whole = each(memory.search, situations)
    return {**loaded, **spread("search", search), **spread("retrieve", whole)}


PARTS: dict[str, Callable[[str, int], dict[str, float]]] = {"write": write, "read": read, "retrieve": retrieve}


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--store", help="URL of an empty database; default: an SQLite file in a temporary folder")
    parser.add_argument("--skip", choices=list(PARTS), action="append", default=[])
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        figures = PARTS[args.part](args.store, args.episodes)
        print(json.dumps({"rss_mb": peak_mb(), **figures}))
        return 0

    folder = Path(tempfile.mkdtemp(prefix="bench-memory-"))
    figures: dict[str, float] = {}
    try:
        url = args.store or f"sqlite:///{folder}/memory.db"
        for part in PARTS:
            if part in args.skip:
                continue
            print(f"{part} …", file=sys.stderr)
            command = [sys.executable, __file__, "--part", part, "--store", url, "--episodes", str(args.episodes)]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            figures |= {f"{part}.{name}": value for name, value in found.items()}
        files = sum(file.stat().st_size for file in folder.iterdir())
        if files:
            figures["write.bytes_per_step"] = files / (args.episodes * STEPS)
    finally:
        shutil.rmtree(folder)
    return report(figures, args.episodes)


def latency(text: str, name: str) -> tuple[str, tuple[str, ...], str]:
    return f"{text}, ms", tuple(f"{name}_{part}" for part in ("ms", "p95_ms", "cpu_ms", "p95_cpu_ms")), "{:.1f}"


ROWS = (
    ("ingest, steps/s", ("write.ingest_steps_per_s", "", "write.ingest_steps_per_cpu_s"), "{:,.0f}"),
    ("records and links written/s", ("write.records_per_s", "", "write.records_per_cpu_s"), "{:,.0f}"),
    ("database, bytes a step", ("write.bytes_per_step",), "{:,.0f}"),
    ("peak memory while writing, MB", ("write.rss_mb",), "{:,.0f}"),
    latency("trace from a principle down", "read.trace_down"),
    latency("trace from a step up", "read.trace_up"),
    latency("one trajectory", "read.trajectory"),
    ("peak memory while tracing, MB", ("read.read_rss_mb",), "{:,.0f}"),
    ("snapshot of new content, ms", ("read.snapshot_ms", "", "read.snapshot_cpu_ms"), "{:,.0f}"),
    ("snapshot of unchanged content, ms", ("read.snapshot_again_ms", "", "read.snapshot_again_cpu_ms"), "{:.1f}"),
    ("provenance, ms", ("read.provenance_ms", "", "read.provenance_cpu_ms"), "{:,.0f}"),
    ("reading the memory for retrieval, s", ("retrieve.load_s", "", "retrieve.load_cpu_s"), "{:.1f}"),
    latency("search of three levels", "retrieve.search"),
    latency("retrieval with embedding", "retrieve.retrieve"),
    ("peak memory with indexes and MiniLM, MB", ("retrieve.rss_mb",), "{:,.0f}"),
)

GOALS = {
    "write.ingest_steps_per_s": ("ingest at least 2,000 steps/s", lambda value: value >= 2000),
    "read.trace_down_p95_cpu_ms": ("trace down under 50 ms", lambda value: value < 50),
    "read.trace_up_p95_cpu_ms": ("trace up under 50 ms", lambda value: value < 50),
    "retrieve.retrieve_cpu_ms": ("retrieval under 20 ms", lambda value: value < 20),
}


def report(figures: dict[str, float], episodes: int) -> int:
    """Print the table and the goals; 1 where one is missed."""
    print(
        f"{episodes:,} episodes, {episodes * STEPS:,} steps, {figures.get('write.records', 0):,.0f} records and links"
    )
    print(f"{'':42}" + "".join(f"{head:>10}" for head in ("median", "95 %", "CPU", "CPU 95 %")))
    for name, keys, form in ROWS:
        cells = [form.format(figures[key]) if key in figures else "" for key in keys]
        if any(cells):
            print(f"{name:42}" + "".join(f"{cell:>10}" for cell in cells))
    missed = [text for key, (text, holds) in GOALS.items() if key in figures and not holds(figures[key])]
    print(f"goals: {'MISSED: ' + '; '.join(missed) if missed else 'met'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    raise SystemExit(main())
