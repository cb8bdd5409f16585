"""The configuration's section ``memory`` and the memory itself: opening it, and crediting it with what was played."""

from __future__ import annotations

from pathlib import Path

from envs.cache import cache_folder
from memory.embedding import make_embedder
from memory.guide import Memory, ledger_entries
from memory.language_model import LanguageModel
from memory.predicates import PredicateHost
from memory.store import LedgerEntry, Store
from train.config import MemoryConfig
from train.ingest import GRAMMARS
from train.trajectory import Episode


def store_url(settings: MemoryConfig, folder: Path) -> str:
    """Address of the store that a run in ``folder`` uses."""
    return settings.store or f"sqlite:///{folder / 'memory.db'}"


PATIENCE_S = 10.0
"""Seconds that a check of predicates may take where results must not depend on how busy the machine is."""


def open_memory(
    settings: MemoryConfig | None, world: str, folder: Path, *, deterministic: bool = False
) -> Memory | None:
    """What the players of a phase in ``world`` are guided by; None without a section ``memory``, or with mode ``none``.

    It is the store as it is now: open it anew after the store has learnt. Close it after its last episode.

    Raises:
        MemoryRecordError: no such store, or settings that need what is not given. EmbeddingFault.
    """
    if settings is None or settings.mode == "none":
        return None
    return Memory(
        Store(store_url(settings, folder), create=settings.store is None),
        settings,
        grammar=grammar_of(world),
        embedder=make_embedder(settings.embedder, cache_folder() / "vectors.db"),
        host=predicate_host(settings, deterministic=deterministic),
        builder=instantiating_model(settings, folder),
    )


def grammar_of(world: str) -> str:
    """Name of the form of ``world``'s actions."""
    return GRAMMARS.get(world, world)


def predicate_host(settings: MemoryConfig, *, deterministic: bool) -> PredicateHost | None:
    """What evaluates predicates in play; None: nothing is regulated."""
    if settings.mode not in ("direct", "full") or not settings.attempts:
        return None
    return PredicateHost(deadline=PATIENCE_S) if deterministic else PredicateHost()


def instantiating_model(settings: MemoryConfig, folder: Path) -> LanguageModel | None:
    """The model that ``instantiation: builder`` asks; None where it is not asked."""
    if settings.instantiation != "builder" or settings.builder.model is None:
        return None
    return LanguageModel(settings.builder.model, folder / "builder" / "calls")


def episode_ledger(episode: Episode, run: str) -> list[LedgerEntry]:
    """What a finished episode of the run ``run`` adds to the memory's ledgers; repeating it changes nothing."""
    if episode.memory is None:
        return []
    regulations = [step.regulation for step in episode.steps if step.regulation is not None]
    return ledger_entries(episode.memory, regulations, f"run:{run}/{episode.id}", bounded_score(episode))


def bounded_score(episode: Episode) -> float | None:
    """The score in [0, 1] that the memory counts; None after a fault."""
    return min(1.0, max(0.0, episode.score)) if episode.status == "ok" else None
