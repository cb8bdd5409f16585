"""The evaluations of a run: on its frozen task set, with memory and table, and without."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from train.evaluate import evaluate, failure_line
from train.run import Run
from train.schedule import WITHOUT


async def evaluate_phase(run: Run, phase: str) -> dict[str, dict[str, Any]]:
    """Evaluate the policy as it is, and also without memory and table, where it has them; the results by phase."""
    if not run.journal.done(phase):
        await run.take_up_knowledge()
        if run.policy.guided and not run.journal.done(phase + WITHOUT):  # the one that closes the phase comes last
            await _evaluate(run, phase + WITHOUT, guided=False)
        await _evaluate(run, phase, guided=True)
    return {arm: _read(run, arm) for arm in (phase, phase + WITHOUT) if run.journal.done(arm)}


def _read(run: Run, phase: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.folder / "evals" / f"{phase}.json").read_text())
    return found


async def _evaluate(run: Run, phase: str, *, guided: bool) -> None:
    config, policy = run.config, run.policy
    result = await evaluate(
        run.pool,
        lambda job: policy.player(replace(job, guided=guided), config.eval.temperature),
        run.sets[config.eval.tasks],
        config,
        phase=phase,
        folder=run.folder,
        agent="policy",
        adapter=policy.adapter,
        dtype=policy.dtype,
        memory=policy.memory if guided else None,
        states=policy.states if guided else None,
        adapter_hash=run.versions.acting_hash,
    )
    metrics = result["metrics"]
    flat = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
    evaluations = sum(name.startswith("eval-") for name in run.journal.phases)
    run.tracker.log(evaluations + 1, phase, **flat)
    low, high = metrics["success_interval"]
    failures = failure_line(metrics)
    told = f"; failed episodes: {failures}" if failures else ""
    run.say(f"{phase}: success {metrics['success']:.1%} ({low:.1%} – {high:.1%}){told}")
    run.finish(phase)
