"""Distilling: from the trajectories of a store upward, by the builder that the settings name, and consolidation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from memory.build_report import BuildReport
from memory.builder import LanguageModelBuilder
from memory.builder_settings import BuilderSettings
from memory.consolidate import ConsolidationReport, consolidate
from memory.embedding import Embedder
from memory.language_model import LanguageModel
from memory.lifting import GRAMMAR_TRAJECTORIES, fit_grammar
from memory.offline import Built, OfflineSettings, build
from memory.records import LEVEL_NAMES, AnyItem, Trajectory
from memory.store import Store

_NOT_FOUND = "no longer found in the trajectories"


@dataclass
class OfflineReport:
    """What a build without a model did: records by kind; ids of write rejections with reasons."""

    written: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)
    retired: Counter[str] = field(default_factory=Counter)
    rejected: list[tuple[str, str]] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report for the eye."""

        def counts(counter: Counter[str]) -> str:
            return ", ".join(f"{name} {count}" for name, count in sorted(counter.items())) or "none"

        lines = [f"new records: {counts(self.written)}", f"found again: {counts(self.known)}"]
        if self.retired:
            lines.append(f"no longer found, retired: {counts(self.retired)}")
        return lines + [f"rejected: {id}: {reason}" for id, reason in self.rejected]


@dataclass
class DistilReport:
    built: OfflineReport | BuildReport
    consolidated: ConsolidationReport

    def lines(self) -> list[str]:
        return [*self.built.lines(), *self.consolidated.lines()]


def distil(
    store: Store,
    settings: BuilderSettings,
    embedder: Embedder,
    folder: Path,
    *,
    round: int = 0,
    offline: OfflineSettings | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> DistilReport:
    """Build on what is new in ``store``, then consolidate.

    Args:
        folder: where a language-model builder keeps its journal and the answers it paid for (``calls``).
        tell: takes a line on the progress now and then.

    Raises:
        MemoryRecordError: a damaged journal, an address or key that cannot be one. EmbeddingFault.
    """
    built: OfflineReport | BuildReport
    if settings.builder == "model":
        assert settings.model is not None
        model = LanguageModel(settings.model, folder / "calls")
        try:
            built = LanguageModelBuilder(store, model, settings, folder, tell=tell).build(round)
        finally:
            model.close()
    else:
        built = build_offline(store, offline, round=round, tell=tell)
    return DistilReport(built, consolidate(store, embedder, settings.consolidation, round))


def build_offline(
    store: Store,
    settings: OfflineSettings | None = None,
    *,
    round: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> OfflineReport:
    """Build each world and grammar from all its trajectories and write what was found.

    What an earlier build found and this one does not is retired while it is an untested candidate; it comes back when
    it is found again.
    """
    report = OfflineReport()
    scopes: dict[tuple[str, str], list[Trajectory]] = defaultdict(list)
    for trajectory in store.trajectories():
        scopes[trajectory.world, trajectory.grammar].append(trajectory)
    for (world, grammar), trajectories in sorted(scopes.items()):
        # The forms that a guide will parse actions by, so that predicates mean the same there.
        forms = fit_grammar(list(islice(store.trajectories(grammar=grammar), GRAMMAR_TRAJECTORIES)))
        built = build(trajectories, grammar=forms, round=round, settings=settings)
        _take(store, built, report, round)
        _retire_what_is_gone(store, world, grammar, {item.id for item in built.items}, report, round)
        tell(f"{world}/{grammar}: {len(built.items)} records from {len(trajectories)} trajectories")
    return report


def _take(store: Store, built: Built, report: OfflineReport, round: int) -> None:
    written = store.write(built.items, built.links, {one.item: one.verdict for one in built.judgements})
    kinds = {item.id: _kind(item) for item in built.items}
    report.written.update(kinds[id] for id in written.accepted)
    report.known.update(kinds[id] for id in written.known)
    report.rejected += written.rejected
    for id in written.known:
        stored = store.item(id)
        if stored.status == "retired" and stored.reason.startswith(_NOT_FOUND):
            store.set_status(id, "candidate", "found again", round)


def _retire_what_is_gone(
    store: Store, world: str, grammar: str, found: set[str], report: OfflineReport, round: int
) -> None:
    for level in (2, 3):
        for stored in store.items(level, statuses=["candidate"], world=world, grammar=grammar):
            if stored.item.builder == "offline" and stored.id not in found:
                store.set_status(stored.id, "retired", f"{_NOT_FOUND} (round {round})", round)
                report.retired[_kind(stored.item)] += 1


def _kind(item: AnyItem) -> str:
    return LEVEL_NAMES[item.level]
