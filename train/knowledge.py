"""What a run knows beside its weights: memory and table of values in a store of its own, as of its last finished phase.

The store is ``memory.db`` in the run's folder. It changes in a round's phases ``learn`` to ``validate`` and at the
round's end, never while the policy plays. After each such phase a copy is kept, which the journal names: a killed run
goes on with that copy, so that half of a phase is never trusted, and memory and table are those that the adapter acted
with. A memory that the configuration names is where the run's begins; it is copied and never written.
"""

from __future__ import annotations

from pathlib import Path

from memory.copies import copy_memory, remove_log
from memory.guide import Memory
from memory.recall import StateMemory
from memory.samem_store import read_barriers
from memory.store import Store
from train.config import Config, MemoryConfig, SamemConfig
from train.memory import open_memory
from train.preflight import Journal
from train.samem import open_states

STORE = "memory.db"
BEGIN = "memory"
"""The phase in which the run's store is made."""


class Knowledge:
    """The store of the run in ``folder``, brought back to what the last finished phase left.

    Args:
        finished: the run is at its end: the store stays as it is, with whatever was done to it since.

    Raises:
        MemoryRecordError: the memory that the configuration names cannot be read.
    """

    def __init__(self, config: Config, folder: Path, journal: Journal, *, finished: bool) -> None:
        self.config = config
        self.fresh = True
        """Whether it has changed since :meth:`guides`."""
        self.names: dict[str, str] = {}
        """Content hashes of memory and table, for whatever rests on them."""
        self._folder = folder
        live = folder / STORE
        if not journal.done(BEGIN):
            self._begin(live)
        elif not finished:
            copy_memory(f"sqlite:///{folder / journal.last('store')}", live)
        self.store = Store(f"sqlite:///{live}")
        self._name()
        if not journal.done(BEGIN):
            journal.finish(BEGIN, store=self.keep(BEGIN), **self.names)

    def _begin(self, live: Path) -> None:
        source = self.config.memory.store if self.config.memory else None
        if source is not None:
            copy_memory(source, live)
        elif not (self._folder / "episodes").exists():  # else the run is of a version that kept no copies
            remove_log(live)
            live.unlink(missing_ok=True)

    def close(self) -> None:
        self.store.close()

    def keep(self, phase: str) -> str:
        """Copy the store as it is after ``phase``; returns the copy's path within the run's folder."""
        self.fresh = True
        self._name()
        kept = f"state/memory-{phase}.db"
        copy_memory(f"sqlite:///{self._folder / STORE}", self._folder / kept)
        return kept

    def _name(self) -> None:
        self.names = {"memory": self.store.snapshot()}
        if self.values is not None:
            barriers = read_barriers(self.store, self.values.table)
            self.names["table"] = barriers[-1].snapshot if barriers else ""

    @property
    def memory(self) -> MemoryConfig | None:
        """Settings of the run's memory, without the one that it began with."""
        return self.config.memory.model_copy(update={"store": None}) if self.config.memory else None

    @property
    def values(self) -> SamemConfig | None:
        """Settings of the table that the run learns; None: it learns none."""
        settings = self.config.samem
        return settings if settings is not None and settings.database is None else None

    def guides(self) -> tuple[Memory | None, StateMemory | None]:
        """What the policy is guided by until the next change; None where there is nothing to show."""
        self.fresh = False
        config = self.config
        memory = open_memory(self.memory, config.env.name, self._folder, deterministic=config.run.deterministic)
        if memory is not None and memory.empty:
            memory.close()
            memory = None
        states = open_states(config.samem, self.memory, self._folder)
        return memory, states if states is not None and states.snapshot.values else None
