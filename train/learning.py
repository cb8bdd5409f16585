"""What a round makes of rollouts beside gradients: values of thoughts, a memory, and judgements of its principles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from envs.cache import cache_folder
from memory.audit_store import audit_store
from memory.build_report import BuildReport
from memory.distil import distil
from memory.embedding import EmbeddingFault, make_embedder
from memory.predicates import PredicateHost
from train.chat import ModelFault
from train.collecting import read_phases
from train.config import MemoryConfig
from train.ingest import trajectory_of
from train.knowledge import Knowledge
from train.memory_validate import conclude, make_plan, play_plan
from train.round_figures import level_changes, statuses
from train.run import Run
from train.samem import learn_new, open_with
from train.schedule import audit_phase, distil_phase, learn_phase, sources, validate_phase


async def gain_knowledge(run: Run, knowledge: Knowledge, round: int) -> None:
    """Learn values, distil, audit and validate, as far as the configuration asks for it; nothing without rollouts.

    Raises:
        ModelFault: see the phases.
    """
    if not sources(run.config, round):
        return
    _journalled(run, learn_phase(round), round, lambda: _learn(run, knowledge, round))
    memory = knowledge.memory
    if memory is None or memory.mode not in ("direct", "full", "shuffled"):
        return  # raw trajectories are all that is shown
    _journalled(run, distil_phase(round), round, lambda: _distil(run, knowledge, memory, round))
    _journalled(run, audit_phase(round), round, lambda: _audit(run, knowledge, memory, round))
    if memory.mode != "shuffled" and memory.validation.episodes:
        await _validate(run, knowledge, memory, round)


def _journalled(run: Run, phase: str, round: int, work: Callable[[], dict[str, Any]]) -> None:
    if run.journal.done(phase):
        return
    left = work()
    run.tracker.log(round, phase, **{name: value for name, value in left.items() if isinstance(value, int | float)})
    run.finish_learning(phase, **left)


def _learn(run: Run, knowledge: Knowledge, round: int) -> dict[str, Any]:
    """Add the round's rollouts to the memory, and learn the values of their thoughts.

    Raises:
        ModelFault: no vectors.
    """
    name, store = run.config.run.name, knowledge.store
    episodes = read_phases(run.folder, sources(run.config, round))
    found = [trajectory_of(episode, name, round) for episode in episodes]
    left: dict[str, Any] = {"trajectories": store.add_trajectories(found)}
    said = f"{left['trajectories']} trajectories"
    settings = knowledge.values
    if settings is not None:
        try:
            table, words = open_with(store, settings.table, settings)
            learnt = learn_new(store, table, words, found, name=settings.table)
        except EmbeddingFault as fault:
            raise ModelFault(str(fault)) from None
        left |= {"updates": learnt.updates, "forgotten": learnt.forgotten}
        said += f", {learnt.updates} updates of values"
    run.say(f"{learn_phase(round)}: {said}")
    return left


def _distil(run: Run, knowledge: Knowledge, memory: MemoryConfig, round: int) -> dict[str, Any]:
    """Build episodes, procedures and principles upon what is new, and consolidate.

    Raises:
        ModelFault: no vectors, or a language model that does not answer (what it was paid for is kept).
    """
    store = knowledge.store
    before = statuses(store)
    try:
        embedder = make_embedder(memory.embedder, cache_folder() / "vectors.db")
        report = distil(store, memory.builder, embedder, run.folder / "builder", round=round, tell=run.say)
    except EmbeddingFault as fault:
        raise ModelFault(str(fault)) from None
    if isinstance(report.built, BuildReport) and report.built.failed:
        raise ModelFault(report.built.stopped)
    changed = level_changes(before, statuses(store), [merge.retired for merge in report.consolidated.merges])
    spend = report.built.spend if isinstance(report.built, BuildReport) else {}
    told = "; ".join(f"{name}s +{of.added}, {of.merged} merged, {of.retired} retired" for name, of in changed.items())
    run.say(f"{distil_phase(round)}: {told}")
    return {"changes": {name: asdict(of) for name, of in changed.items()}, "spend": spend}


def _audit(run: Run, knowledge: Knowledge, memory: MemoryConfig, round: int) -> dict[str, Any]:
    """Judge the predicates on the trajectories of the memory."""
    with PredicateHost() as host:
        audited = audit_store(knowledge.store, host, memory.audit, round=round, world=run.config.env.name)
    verdicts = Counter(row.audit.decision for row in audited)
    told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())) or "no predicates"
    run.say(f"{audit_phase(round)}: {told}")
    return {"predicates": dict(sorted(verdicts.items()))}


async def _validate(run: Run, knowledge: Knowledge, memory: MemoryConfig, round: int) -> None:
    """Try principles on training tasks that the memory does not rest on."""
    phase = validate_phase(round)
    if run.journal.done(phase):
        return
    section = run.config.collect or run.config.grpo or run.config.rejection
    assert section is not None
    await run.take_up_knowledge()
    tasks, store = run.sets[section.tasks], knowledge.store
    plan = make_plan(store, run.config, memory, tasks, round)
    results = []
    if plan.trials:
        name = run.config.run.name
        results = await play_plan(
            run.policy, run.pool, run.config, memory, store, plan, tasks, round=round, folder=run.folder, run=name
        )
    found = conclude(run.config, memory, store, plan, results, section.tasks, round)
    decisions = Counter(verdict["decision"] for verdict in found.verdicts)
    told = ", ".join(f"{count} {decision}" for decision, count in sorted(decisions.items())) or "no principle was tried"
    run.say(f"{phase}: {told}; {plan.episodes} episodes, {len(found.retired)} retired by their ledgers")
    run.tracker.log(round, phase, episodes=plan.episodes, tried=len(found.verdicts), retired=len(found.retired))
    run.finish_learning(phase, decisions=dict(sorted(decisions.items())), retired=len(found.retired))
