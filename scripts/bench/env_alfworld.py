"""Speed of the ALFWorld engine beside the stock packages, on the same games with the same actions and traces.

    python scripts/bench/env_alfworld.py                 # a minute or two; real games where ALFWORLD_DATA is set
    python scripts/bench/env_alfworld.py --games 24 --rounds 3

Sides: ``saga`` (envs.alfworld_engine), ``light`` (TextWorld's PddlEnv under ALFWorld's AlfredDemangler: the least that
the stock packages can do) and ``alfworld`` (ALFWorld's own AlfredTWEnv with a batch of one). Every side plays in a
process of its own, side after side, round after round; ``saga, kept`` is a later process that finds the games already
translated in its cache folder. Times are CPU seconds of that process, so other load on the machine distorts little.

    start   a game that this process has not played before: load and reset
    reset   another episode of that game, the way each side does it (saga loads again, as its AlfworldEnv does; light
            only resets; AlfredTWEnv's reset always loads)
    step    one action, with the list of admissible commands

Exit code 1: the traces differ, or saga misses a goal (steps 3x, resets 10x faster than both stock sides).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STOCK = ("light", "alfworld")
SIDES = ("saga", "saga, kept", *STOCK)
KINDS = ("start", "reset", "step")
GOALS = {"step": 3.0, "reset": 10.0}
RANDOM_ACTIONS = 25

Seen = tuple[str, list[str], bool]
"""(observation, sorted admissible commands, won)."""


class Saga:
    def __init__(self, folder: Path) -> None:
        from envs.alfworld_engine import AlfworldEngine

        self.engine = AlfworldEngine(cache=folder / "cache")

    def start(self, game: Path) -> Seen:
        self.engine.load(game)
        return self.engine.reset(), self.engine.admissible, self.engine.won

    reset = start

    def step(self, action: str) -> Seen:
        return self.engine.step(action), self.engine.admissible, self.engine.won


class Light:
    def __init__(self, folder: Path) -> None:
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld.envs.pddl import PddlEnv

        self.env = AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))

    def start(self, game: Path) -> Seen:
        self.env.load(str(game))
        return self.reset(game)

    def reset(self, game: Path) -> Seen:
        return self._seen(self.env.reset())

    def step(self, action: str) -> Seen:
        return self._seen(self.env.step(action)[0])

    @staticmethod
    def _seen(state: Any) -> Seen:
        return state.feedback, state["admissible_commands"], state["won"]


class Alfworld:
    def __init__(self, folder: Path) -> None:
        from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv

        self.envs = {}
        for game in sorted(folder.glob("*/game.tw-pddl")):
            config = {
                "env": {
                    "goal_desc_human_anns_prob": 0,
                    "task_types": [1, 2, 3, 4, 5, 6],
                    "domain_randomization": False,
                    "expert_type": "handcoded",
                },
                "dataset": {"eval_id_data_path": str(game.parent), "num_eval_games": 0},
                "general": {"training_method": "dqn"},
                "rl": {"training": {"max_nb_steps_per_episode": 1000}},
            }
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                self.envs[game] = AlfredTWEnv(config, train_eval="eval_in_distribution").init_env(batch_size=1)

    def start(self, game: Path) -> Seen:
        self.env = self.envs[game]
        return self._seen(*self.env.reset())

    reset = start

    def step(self, action: str) -> Seen:
        observation, _, _, infos = self.env.step([action])
        return self._seen(observation, infos)

    @staticmethod
    def _seen(observation: Any, infos: Any) -> Seen:
        return observation[0], infos["admissible_commands"][0], infos["won"][0]


WORLDS: dict[str, Any] = {"saga": Saga, "saga, kept": Saga, "light": Light, "alfworld": Alfworld}


def play(side: str, folder: Path) -> dict[str, Any]:
    """Times (CPU seconds, one list entry per call), the hash of everything seen, and the games won."""
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    trace = hashlib.sha256()
    world = WORLDS[side](folder)

    def timed(kind: str, argument: Any) -> Seen:
        start = time.process_time()
        seen: Seen = getattr(world, kind)(argument)
        times[kind].append(time.process_time() - start)
        trace.update(json.dumps(seen).encode())
        return seen

    wins = 0
    for number, game in enumerate(sorted(folder.glob("*/game.tw-pddl"))):
        rng = random.Random(number)
        seen = timed("start", game)
        for action in json.loads(game.read_text())["walkthrough"]:
            seen = timed("step", action)
        wins += seen[2]
        seen = timed("reset", game)
        for index in range(RANDOM_ACTIONS):
            if not seen[2]:
                seen = timed("step", "put everything in order" if index % 8 == 7 else rng.choice(seen[1]))
    return {"times": times, "trace": trace.hexdigest(), "wins": wins}


def write_games(folder: Path, count: int) -> str:
    """Write ``count`` games under ``folder`` in ALFWorld's layout (real ones spread over a split, else generated)."""
    if os.environ.get("ALFWORLD_DATA"):
        from envs.alfworld_data import alfworld_tasks, data_folder, game_file

        data = data_folder()
        split = next(name for name in ("valid_unseen", "valid_seen") if (data / "json_2.1.1" / name).is_dir())
        tasks = alfworld_tasks(split, data)
        source = f"official {split}"
        chosen = [tasks[index * len(tasks) // count] for index in range(count)]
        texts = [(task.type, game_file(data, task.id).read_text()) for task in chosen]
    else:
        from envs.household import generate, household_task

        source = "generated households, hard"
        texts = [(household_task("hard", seed).type, generate("hard", seed)) for seed in range(count)]
    for number, (task_type, text) in enumerate(texts):
        game = folder / f"game-{number:03}"
        game.mkdir()
        (game / "game.tw-pddl").write_text(text)
        (game / "traj_data.json").write_text(json.dumps({"task_type": task_type}))
    return source


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--games", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(play(args.side, args.folder)))
        return 0

    results: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    folder = Path(tempfile.mkdtemp(prefix="bench-alfworld-"))
    try:
        source = write_games(folder, args.games)
        for number in range(args.rounds):
            shutil.rmtree(folder / "cache", ignore_errors=True)
            for side in SIDES:
                print(f"round {number + 1} of {args.rounds}: {side} plays {args.games} games", file=sys.stderr)
                command = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
                results[side].append(json.loads(done.stdout.splitlines()[-1]))
    finally:
        shutil.rmtree(folder)
    print(f"{args.games} games ({source}), {args.rounds} round(s); CPU time, mean per call")
    return report(results, args.games)


def report(results: dict[str, list[dict[str, Any]]], games: int) -> int:
    seconds = {
        side: {kind: statistics.fmean(x for result in runs for x in result["times"][kind]) for kind in KINDS}
        for side, runs in results.items()
    }
    print(f"{'':12}{'start ms':>10}{'reset ms':>10}{'step ms':>10}{'steps/s':>10}")
    for side, row in seconds.items():
        start, reset, step = (1000 * row[kind] for kind in KINDS)
        print(f"{side:12}{start:10.1f}{reset:10.1f}{step:10.2f}{1000 / step:10.0f}")
    missed = []
    for side in STOCK:
        for fast in ("saga", "saga, kept"):
            ratio = {kind: seconds[side][kind] / seconds[fast][kind] for kind in KINDS}
            print(f"{fast} is faster than {side}: " + ", ".join(f"{kind} {ratio[kind]:.1f}x" for kind in KINDS))
            missed += [
                f"{fast} {kind} {ratio[kind]:.1f}x vs {side}" for kind, goal in GOALS.items() if ratio[kind] < goal
            ]
    traces = {result["trace"] for runs in results.values() for result in runs}
    wins = {result["wins"] for runs in results.values() for result in runs}
    print(f"traces: {'identical' if len(traces) == 1 else 'DIFFERENT'} ({', '.join(item[:12] for item in traces)})")
    print(f"walkthroughs won: {', '.join(map(str, wins))} of {games}")
    print(f"goals (step 3x, reset 10x): {'met' if not missed else 'MISSED: ' + '; '.join(missed)}")
    return 0 if len(traces) == 1 and not missed else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    raise SystemExit(main())
