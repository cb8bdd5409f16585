"""What a run shows at its end: the table of its evaluations, on screen and as ``report.md``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from train.config import Config
from train.schedule import WITHOUT
from train.tables import compact_table, percent, success_text

_NAMES = {
    "eval-start": "at the start",
    "eval-warm": "after warm start",
    "eval-rejection": "after rejection sampling",
}


def evaluation_name(config: Config, phase: str) -> str:
    """What a table calls the evaluation of ``phase``."""
    whole = phase.removesuffix(WITHOUT)
    if whole in _NAMES:
        name = _NAMES[whole]
    elif config.rounds == 1:
        name = "after RL" if config.grpo else "after the round"
    else:
        name = f"after round {config.rounds if whole == 'eval-final' else int(whole.rpartition('-')[2])}"
    return name if whole == phase else f"{name}, without memory"


_CLOSING_COLUMNS = ("policy", "games", "success % (95 %)", "score", "steps", "invalid actions %")


def closing_table(config: Config, evals: dict[str, dict[str, Any]]) -> Table:
    """The success rates of a run's evaluations, with intervals."""
    table = compact_table("held-out games", _CLOSING_COLUMNS, left=("policy",))
    for row in _closing_rows(config, evals):
        table.add_row(*row)
    return table


def _closing_rows(config: Config, evals: dict[str, dict[str, Any]]) -> list[list[str]]:
    return [
        [
            evaluation_name(config, phase),
            str(result["metrics"]["items"]),
            success_text(result["metrics"]["success"], result["metrics"]["success_interval"]),
            f"{result['metrics']['score']:.3f}",
            f"{result['metrics']['steps']:.1f}",
            percent(result["metrics"]["invalid_rate"]),
        ]
        for phase, result in evals.items()
    ]


def report_text(config: Config, folder: Path, evals: dict[str, dict[str, Any]], adapter: str | None) -> str:
    """``report.md``: what was run, the table of success rates, and success per task type."""
    lines = [f"# {config.run.name}", "", f"Model {config.model.name}, task set {config.eval.tasks}.", ""]
    lines += [f"| {' | '.join(_CLOSING_COLUMNS)} |", f"|{'---|' * len(_CLOSING_COLUMNS)}"]
    lines += [f"| {' | '.join(row)} |" for row in _closing_rows(config, evals)]
    types = sorted({name for result in evals.values() for name in result["metrics"]["by_type"]})
    names = " | ".join(evaluation_name(config, phase) for phase in evals)
    lines += ["", "Success by task type:", "", f"| task type | {names} |"]
    lines += [f"|---|{'---|' * len(evals)}"]
    for name in types:
        cells = [f"{result['metrics']['by_type'][name]['success']:.1%}" for result in evals.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if adapter:
        lines += ["", f"Adapter: `{folder / adapter}`"]
    return "\n".join(lines) + "\n"
