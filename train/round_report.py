"""The end of a round: its checkpoint in the journal, and what it changed, as one block for the eye and one line of
metrics."""

from __future__ import annotations

from collections import Counter
from typing import Any

from envs.cache import cache_folder
from memory.embedding import make_embedder
from memory.records import LEVEL_NAMES
from memory.samem_store import load_table
from train.collecting import read_phases
from train.config import SamemConfig
from train.knowledge import Knowledge
from train.metrics import summarise
from train.round_figures import in_use, regulation_figures, round_credits, statuses
from train.run import Run
from train.schedule import audit_phase, distil_phase, iteration_phase, played_in, round_iterations, round_phase
from train.trajectory import Episode

Figures = dict[str, Any]
"""Numbers, names and None (not known), by name."""

_CHANGES = ("added", "merged", "retired")


def close_round(run: Run, round: int) -> None:
    """Credit the memory with what was played, print and log the round's figures, and journal its checkpoint."""
    phase = round_phase(round)
    episodes = list(read_phases(run.folder, played_in(run.config, round)))
    parts = [_version(run), _play(run, episodes, round)]
    if run.knowledge is not None:
        if run.config.memory is not None:
            run.knowledge.store.credit(round_credits(episodes, run.config.run.name))
            parts += [_memory(run, run.knowledge, episodes, round)]
        if run.knowledge.values is not None:
            parts += [_table(run.knowledge, run.knowledge.values)]
    whole = {name: value for figures in parts for name, value in figures.items()}
    run.say(f"round {round} of {run.config.rounds}: {_version_text(whole)}")
    for line in block(whole):
        run.say(f"  {line}")
    run.tracker.log(round, "round", **whole)
    finish = run.finish if run.knowledge is None else run.finish_learning
    finish(phase, adapter_hash=run.versions.acting_hash, trainer=run.journal.last("trainer"), figures=whole)


def _version(run: Run) -> Figures:
    names = run.knowledge.names if run.knowledge is not None else {}
    return {"adapter": run.policy.adapter, **names}


def _play(run: Run, episodes: list[Episode], round: int) -> Figures:
    summary = summarise(episodes)
    figures: Figures = {"episodes_played": summary["episodes"], "success": summary["success"]}
    figures |= {name: summary[name] for name in ("invalid_rate", "repeated_rate")}
    if run.config.grpo is not None:
        signals = [run.journal.left(iteration_phase(i))["signal"] for i in round_iterations(run.config.grpo, round)]
        counts = [pair for signal in signals for pair in signal.values()]
        figures["tasks"] = sum(played for _, played in counts)
        figures["zero_signal_tasks"] = sum(played - loud for loud, played in counts)
    return figures


def _memory(run: Run, knowledge: Knowledge, episodes: list[Episode], round: int) -> Figures:
    journal, found = run.journal, statuses(knowledge.store)
    figures: Figures = {f"{name}s": count for name, count in in_use(found).items()}
    if journal.done(distil_phase(round)):
        for name, of in journal.left(distil_phase(round))["changes"].items():
            figures |= {f"{name}s_{what}": count for what, count in of.items()}
    standing = Counter(status for level, status in found.values() if level == 3)
    figures |= {f"principles_now_{status}": count for status, count in sorted(standing.items())}
    if journal.done(audit_phase(round)):
        verdicts = journal.left(audit_phase(round))["predicates"]
        figures |= {f"predicates_now_{verdict}": count for verdict, count in verdicts.items()}
    regulated = regulation_figures(episodes)
    figures |= {
        "trigger_rate": regulated.trigger_rate,
        "resamples": regulated.resampled,
        "rescued": regulated.rescued,
        "overridden": regulated.overridden,
    }
    return figures


def _table(knowledge: Knowledge, settings: SamemConfig) -> Figures:
    """States and thoughts of the table, and the values of those that were tried."""
    table, _ = load_table(
        knowledge.store, settings, make_embedder(settings.embedder, cache_folder() / "vectors.db"), name=settings.table
    )
    tried = [value for value, visits in zip(table.values, table.visits, strict=True) if visits]
    figures: Figures = {"states": len(table.states), "thoughts": len(table.thoughts), "valued": len(tried)}
    if tried:
        figures |= {"lowest_value": min(tried), "mean_value": sum(tried) / len(tried), "highest_value": max(tried)}
    return figures


def _version_text(figures: Figures) -> str:
    return ", ".join(f"{name} {figures[name]}" for name in ("adapter", "memory", "table") if figures.get(name))


def block(figures: Figures) -> list[str]:
    """A round's figures for the eye: a line each on play, memory, principles, regulation and table, as far as they are
    there."""
    lines = [
        f"play: {figures['episodes_played']} episodes, success {_share(figures['success'])}, invalid actions "
        f"{_share(figures['invalid_rate'])}, repeated {_share(figures['repeated_rate'])}"
    ]
    if "zero_signal_tasks" in figures:
        lines[0] += f", {figures['zero_signal_tasks']} of {figures['tasks']} tasks without signal"
    if "principles" in figures:
        lines.append("memory: " + "; ".join(_level(figures, f"{name}s") for name in LEVEL_NAMES[1:]))
        for kind in ("principles", "predicates"):
            counted = _counts(figures, kind)
            if counted:
                lines.append(f"{kind}: {counted}")
        lines.append(
            f"regulation: in scope on {_share(figures['trigger_rate'])} of checked steps, {figures['resamples']} "
            f"resamples, {_known(figures['rescued'])} actions rescued, {_known(figures['overridden'])} overridden"
        )
    if "states" in figures:
        line = f"table: {figures['states']} states, {figures['thoughts']} thoughts, {figures['valued']} with a value"
        if figures["valued"]:
            low, mean, high = (figures[f"{which}_value"] for which in ("lowest", "mean", "highest"))
            line += f" from {low:.3f} to {high:.3f}, mean {mean:.3f}"
        lines.append(line)
    return lines


def _level(figures: Figures, name: str) -> str:
    changed = [f"{figures[f'{name}_{what}']} {what}" for what in _CHANGES if f"{name}_{what}" in figures]
    return f"{figures[name]} {name}" + (f" ({', '.join(changed)})" if changed else "")


def _counts(figures: Figures, kind: str) -> str:
    start = f"{kind}_now_"
    return ", ".join(f"{count} {name.removeprefix(start)}" for name, count in figures.items() if name.startswith(start))


def _share(value: Any) -> str:
    return "–" if value is None else f"{value:.1%}"


def _known(value: Any) -> str:
    return "–" if value is None else str(value)
