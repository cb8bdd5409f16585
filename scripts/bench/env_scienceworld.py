"""Speed of ScienceWorldEnv beside the stock package, on the same tasks with the same gold actions.

    python scripts/bench/env_scienceworld.py             # some minutes
    python scripts/bench/env_scienceworld.py --rounds 3

Sides: ``saga`` (envs.scienceworld) and ``stock`` (scienceworld.ScienceWorldEnv, whose step makes the list of valid
actions). Each side plays in a fresh process, side after side, round after round, with the same Java options: all tasks
eight times to warm the JVM up (about 1,000 steps; before that its compiler and interpreted code blur the ratio, which
was 6 to 9x after 350 steps with "easy"), then once more to be timed. Of saga's step, 60 % is the simulator's parser and
16 % its physics (sampled with the JVM's flight recorder), which the stock step has too.

    reset   load a task and take the first look
    step    one gold action
    work    CPU ms of Python and of Java's working threads (other load on the machine distorts it little)
    all     the same with Java's compiler threads, which are still busy after a warm-up of some hundred steps
    clock   elapsed ms

Exit code 1: scores, ends or observations (as sorted lines, for the simulator's own order changes from load to load)
differ, or saga misses the goal: steps 10x faster by ``work`` with the stock package's default, no simplification (with
"easy" its lists are shorter, and the ratio lies around 10). The tasks are those whose course hangs neither on the order
of sets nor on random numbers (the stock list of valid actions draws some), and whose
gold actions raise no question: on the others the stock package differs from itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIDES = ("saga", "stock")
SIMPLIFICATIONS = ("easy", "")
TASKS = (
    "test-conductivity/675",
    "find-living-thing/225",
    "find-non-living-thing/225",
    "chemistry-mix/24",
    "test-conductivity-of-unknown-substances/450",
    "lifespan-longest-lived-then-shortest-lived/93",
    "identify-life-stages-1/9",
)
WARM_UPS = 8
GOAL = 10.0
JAVA_OPTIONS = "-Xmx256m -XX:+UseSerialGC"

Seen = tuple[list[str], int, bool]
"""(sorted lines of the observation, score 0 to 100, over)."""


class Saga:
    def __init__(self, simplification: str) -> None:
        from envs.scienceworld import ScienceWorldEnv

        self.env = ScienceWorldEnv(10**6, simplification)

    def reset(self, task: str) -> Seen:
        from envs.base import Task

        first = self.env.reset(Task("scienceworld", task, task.split("/")[0]))
        return self._seen(first.observation.removeprefix(f"{first.goal}\n\n"), first)

    def step(self, action: str) -> Seen:
        result = self.env.step(action)
        return self._seen(result.observation, result)

    @property
    def java(self) -> int:
        assert self.env._simulator is not None
        return self.env._simulator._process.pid

    @staticmethod
    def _seen(observation: str, result: Any) -> Seen:
        return sorted(observation.split("\n")), round(100 * result.score), result.done

    def close(self) -> None:
        self.env.close()


class Stock:
    def __init__(self, simplification: str) -> None:
        from scienceworld import ScienceWorldEnv

        self.env = ScienceWorldEnv("", envStepLimit=10**6)
        self.simplification = simplification

    def reset(self, task: str) -> Seen:
        name, variation = task.split("/")
        self.env.load(name, int(variation), self.simplification)
        observation, info = self.env.reset()
        return sorted(observation.split("\n")), max(0, info["score"]), False

    def step(self, action: str) -> Seen:
        observation, _, over, info = self.env.step(action)
        return sorted(observation.split("\n")), max(0, info["score"]), over

    @property
    def java(self) -> int:
        return int(self.env._gateway.java_process.pid)

    def close(self) -> None:
        self.env.close()


WORLDS: dict[str, Any] = {"saga": Saga, "stock": Stock}


def play(side: str, simplification: str, gold: dict[str, list[str]]) -> dict[str, Any]:
    """Seconds (work, all, clock) of all resets and of all steps, how many there were, and the trace."""
    import psutil

    world = WORLDS[side](simplification)
    trace: list[Seen] = []
    for task, actions in list(gold.items()) * WARM_UPS:
        world.reset(task)
        for action in actions:
            world.step(action)
    java = psutil.Process(world.java)
    spent = {"reset": [0.0, 0.0, 0.0], "step": [0.0, 0.0, 0.0]}

    def timed(kind: str, call: Callable[[], list[Seen]]) -> None:
        before = _seconds(java)
        trace.extend(call())
        spent[kind] = [
            total + end - start for total, start, end in zip(spent[kind], before, _seconds(java), strict=True)
        ]

    for task, actions in gold.items():
        timed("reset", lambda task=task: [world.reset(task)])  # type: ignore[misc]
        timed("step", lambda actions=actions: [world.step(action) for action in actions])  # type: ignore[misc]
    world.close()
    return {"spent": spent, "resets": len(gold), "steps": sum(map(len, gold.values())), "trace": trace}


def _seconds(java: Any) -> tuple[float, float, float]:
    """(work, all, clock) so far of this process and the JVM, whose threads are named in /proc."""
    compilers = 0.0
    for thread in java.threads():
        with contextlib.suppress(FileNotFoundError):  # it has ended since
            if "Compiler" in Path(f"/proc/{java.pid}/task/{thread.id}/comm").read_text():
                compilers += thread.user_time + thread.system_time
    cpu = time.process_time() + sum(java.cpu_times()[:2])
    return cpu - compilers, cpu, time.perf_counter()


def gold_actions(simplification: str) -> dict[str, list[str]]:
    """For each task, the gold actions up to the one that completes it."""
    from envs.base import Task
    from envs.scienceworld import ScienceWorldEnv

    env = ScienceWorldEnv(10**6, simplification)
    gold: dict[str, list[str]] = {}
    for task in TASKS:
        result = env.reset(Task("scienceworld", task, task.split("/")[0]))
        gold[task] = []
        while not result.done:
            gold[task].append(env.expert().action)
            result = env.step(gold[task][-1])
        if not result.won:
            raise SystemExit(f"{task}: the gold actions end with score {100 * result.score:.0f}, not 100")
    env.close()
    return gold


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--simplification", default="easy", help=argparse.SUPPRESS)
    parser.add_argument("--gold", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        result = play(args.side, args.simplification, json.loads(args.gold.read_text()))
        args.out.write_text(json.dumps(result))
        return 0

    os.environ.setdefault("JAVA_TOOL_OPTIONS", JAVA_OPTIONS)
    good = True
    for simplification in SIMPLIFICATIONS:
        gold = gold_actions(simplification)
        results: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        with tempfile.TemporaryDirectory(prefix="bench-scienceworld-") as name:
            folder = Path(name)
            (folder / "gold.json").write_text(json.dumps(gold))
            for number in range(args.rounds):
                for side in SIDES:
                    print(f"{simplification or 'none'}, round {number + 1}: {side} plays", file=sys.stderr)
                    command = [sys.executable, __file__, "--side", side, f"--simplification={simplification}"]
                    command += ["--gold", str(folder / "gold.json"), "--out", str(folder / "out.json")]
                    subprocess.run(command, check=True)
                    results[side].append(json.loads((folder / "out.json").read_text()))
        good &= report(simplification or "none", results)
    return 0 if good else 1


def report(simplification: str, results: dict[str, list[dict[str, Any]]]) -> bool:
    """Print one simplification's table; return whether the traces are equal and the goal is met."""
    first = results["saga"][0]
    print(
        f"\nsimplification {simplification}: {first['resets']} tasks, {first['steps']} gold actions; mean ms per call"
    )
    print(f"{'':14}{'work':>10}{'all':>10}{'clock':>10}")
    ratios = {}
    for kind in ("reset", "step"):
        means = {
            side: [
                1000 * statistics.fmean(run["spent"][kind][index] / run[f"{kind}s"] for run in runs)
                for index in range(3)
            ]
            for side, runs in results.items()
        }
        ratios[kind] = [stock / saga for stock, saga in zip(means["stock"], means["saga"], strict=True)]
        for side, row in means.items():
            print(f"{kind:6}{side:8}" + "".join(f"{value:10.2f}" for value in row))
        print(f"{kind:6}{'faster':8}" + "".join(f"{value:9.1f}x" for value in ratios[kind]))
    met = simplification != "none" or ratios["step"][0] >= GOAL
    if simplification == "none":
        print(f"goal (step {GOAL:.0f}x by work): {'met' if met else 'MISSED'}")
    for run in [run for runs in results.values() for run in runs]:
        for index, (ours, theirs) in enumerate(zip(first["trace"], run["trace"], strict=True)):
            if ours != theirs:
                print(f"DIFFERENT at call {index}:\n  {ours}\n  {theirs}")
                return False
    print(f"scores, ends and sorted observation lines: identical in {len(first['trace'])} calls")
    return met


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    raise SystemExit(main())
