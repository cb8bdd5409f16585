"""What reinforcement learning adds to a warm start: the arms of configs/learning-WORLD.yaml, compared.

    scripts/bench/learning.sh household|alfworld

Arms: ``warm`` (the warm start alone), ``grpo`` and ``gigpo`` (from its adapter, with equal numbers of episodes). Each
is a run of its own under runs/ and goes on where it was stopped. Written to runs/learning-WORLD/: ``result.json`` and
``learning.png``.

    success      share of held-out games won, at the file's eval.temperature, with Wilson's 95 % interval
    difference   against the warm start, paired by game: mean and 95 % interval of the bootstrap over games
    env steps    environment steps of all rollouts

A finished arm is not run again; one that was run with other settings is an error that names them.

Exit code 1: an arm of reinforcement learning has no interval of the difference above zero; it is named.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.config import Config

ROOT = Path(__file__).resolve().parents[2]
ARMS = {
    "warm": ["grpo=null"],
    "grpo": ["warm_start=null"],
    "gigpo": ["warm_start=null", "grpo.step_weight=1.0"],
}
NAMES = {"warm": "warm start", "grpo": "warm start + GRPO", "gigpo": "warm start + GiGPO"}
COLOURS = {"warm": "#7a7a7a", "grpo": "#1f6fb4", "gigpo": "#d1622b"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("world", choices=("household", "alfworld"))
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument("--arms", default="warm,grpo,gigpo", help="which arms to run; those before must have been run")
    parser.add_argument("overrides", nargs="*", help="key.sub=value, as in saga train, for every arm")
    args = parser.parse_intermixed_args()
    names = args.arms.split(",")
    if unknown := set(names) - set(ARMS):
        parser.error(f"--arms: {', '.join(sorted(unknown))} is none of {', '.join(ARMS)}")
    for name in names:
        run_arm(args.world, name, args.runs, args.overrides)
    return report(
        args.world, args.runs, [name for name in ARMS if (folder(args.world, name, args.runs) / "result.json").exists()]
    )


def folder(world: str, arm: str, runs: Path) -> Path:
    return runs / f"learning-{world}-{arm}"


def settings_of(world: str, arm: str, runs: Path, overrides: list[str]) -> list[str]:
    """What is given to ``saga train`` on top of the world's file."""
    settings = [f"run.name={folder(world, arm, runs).name}", f"run.dir={runs}", *ARMS[arm], *overrides]
    if arm != "warm":
        start = folder(world, "warm", runs) / "adapters/policy-v0000"
        if not start.exists():
            raise SystemExit(f"{start} does not exist; run the arm 'warm' first")
        settings.append(f"lora.start={start}")
    return settings


def run_arm(world: str, arm: str, runs: Path, overrides: list[str]) -> None:
    from train.config import load_config

    target = folder(world, arm, runs)
    config, settings = ROOT / f"configs/learning-{world}.yaml", settings_of(world, arm, runs, overrides)
    if (target / "result.json").exists():
        check_same(target, load_config(config, settings))
        return
    command = [sys.executable, "-m", "train.cli", "train", str(config), *settings]
    if (target / "episodes").exists():
        command.append("--resume")
    print(f"\n== {NAMES[arm]}: {' '.join(command[1:])}", file=sys.stderr)
    subprocess.run(command, check=True)


def check_same(run: Path, config: Config) -> None:
    """Raise ConfigError where the finished ``run`` had other settings than ``config``; where it lies is none."""
    from train.config import ConfigError, load_config
    from train.preflight import changed_fields

    before = load_config(run / "config.yaml").model_dump(mode="json")
    changed = set(changed_fields(before, config.model_dump(mode="json"))) - {"run.dir", "lora.start"}
    if changed:
        raise ConfigError(
            f"{run} was run with other settings ({', '.join(sorted(changed))}); give the same ones, or another folder "
            "with --runs"
        )


def report(world: str, runs: Path, arms: list[str]) -> int:
    from rich.console import Console

    from train.metrics import paired_bootstrap
    from train.tables import compact_table, percent, success_text

    evaluations = {arm: evaluation(folder(world, arm, runs), arm) for arm in arms}
    table = compact_table(
        f"learning, {world}",
        ("arm", "games", "success % (95 %)", "difference % (95 %)", "invalid %", "env steps"),
        left=("arm",),
    )
    rows: dict[str, Any] = {}
    for arm, result in evaluations.items():
        metrics = result["metrics"]
        steps = environment_steps(folder(world, arm, runs))
        difference: list[float] | None = None
        if arm != "warm":
            difference = list(paired_bootstrap(wins(evaluations["warm"]), wins(result)))
        rows[arm] = {
            "success": metrics["success"],
            "interval": metrics["success_interval"],
            "difference": difference,
            "env_steps": steps,
            "adapter_hash": result["adapter_hash"],
            "manifest_hash": result["manifest_hash"],
        }
        shown = "" if difference is None else f"{difference[0]:+.1%} ({difference[1]:+.1%} to {difference[2]:+.1%})"
        table.add_row(
            NAMES[arm],
            str(metrics["items"]),
            success_text(metrics["success"], metrics["success_interval"]),
            shown.replace("%", ""),
            percent(metrics["invalid_rate"]),
            str(steps),
        )
    Console().print(table)
    out = runs / f"learning-{world}"
    out.mkdir(parents=True, exist_ok=True)
    (out / "result.json").write_text(json.dumps(rows, indent=2) + "\n")
    draw(world, runs, evaluations, out / "learning.png")
    print(f"{out / 'result.json'}\n{out / 'learning.png'}")
    missed = without_gain({arm: row["difference"] for arm, row in rows.items() if arm != "warm"})
    for arm in missed:
        print(f"{NAMES[arm]}: the interval of the difference is not above zero")
    return 1 if missed or len(rows) < 2 else 0


def without_gain(differences: dict[str, list[float]]) -> list[str]:
    """The arms whose difference (mean, low, high) may be zero or less."""
    return [arm for arm, (_, low, _) in differences.items() if low <= 0]


def evaluation(run: Path, arm: str) -> dict[str, Any]:
    phase = "eval-warm" if arm == "warm" else "eval-final"
    result: dict[str, Any] = json.loads((run / "evals" / f"{phase}.json").read_text())
    return result


def wins(result: dict[str, Any]) -> dict[str, list[float]]:
    """Per game, whether it was won in each seed."""
    games: dict[str, list[float]] = {}
    for item in result["items"]:
        games.setdefault(item["id"], []).append(float(item["won"]))
    return games


def iterations(run: Path) -> list[dict[str, Any]]:
    """The metrics of the run's GRPO iterations; of one that was repeated after a kill, the last."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return list({line["step"]: line for line in lines if line["phase"].startswith("grpo-")}.values())


def environment_steps(run: Path) -> int:
    return round(sum(line["steps"] * line["episodes"] for line in iterations(run)))


def draw(world: str, runs: Path, evaluations: dict[str, dict[str, Any]], path: Path) -> None:
    """Left: success of the sampled rollouts over environment steps. Right: held-out success with intervals."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curve, bars) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(2, 1), layout="constrained")
    for arm in evaluations:
        lines = iterations(folder(world, arm, runs))
        if not lines:
            continue
        steps, total = [], 0.0
        for line in lines:
            total += line["steps"] * line["episodes"]
            steps.append(total / 1000)
        success = [100 * line["success"] for line in lines]
        smooth = [
            sum(success[max(0, i - 2) : i + 1]) / len(success[max(0, i - 2) : i + 1]) for i in range(len(success))
        ]
        curve.plot(steps, success, color=COLOURS[arm], alpha=0.3, linewidth=1)
        curve.plot(steps, smooth, color=COLOURS[arm], label=f"{NAMES[arm]} (mean of 3 iterations)")
    curve.set(xlabel="environment steps (thousands)", ylabel="rollouts won, %", title="training games, sampled")
    curve.set_ylim(bottom=0)
    if curve.lines:
        curve.legend(frameon=False)
    for place, (arm, result) in enumerate(evaluations.items()):
        low, high = result["metrics"]["success_interval"]
        value = result["metrics"]["success"]
        errors = [[100 * (value - low)], [100 * (high - value)]]
        bars.bar(place, 100 * value, yerr=errors, color=COLOURS[arm], width=0.6, capsize=4)
        bars.text(place, 2, f"{100 * value:.0f}", ha="center", color="white", weight="bold")
    bars.set_xticks(range(len(evaluations)), [NAMES[arm].replace(" + ", "\n+ ") for arm in evaluations])
    games = next(iter(evaluations.values()))["metrics"]["items"]
    bars.set(ylabel="games won, % (95 % interval)", title=f"{games} held-out games", ylim=(0, 100))
    for axes in (curve, bars):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
