"""Copies of a memory: its content at one moment, in a file of its own."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from memory.exchange import export_memory, import_memory
from memory.schema import sqlite_file
from memory.store import Store


def copy_memory(url: str, target: Path) -> None:
    """Make ``target`` (an SQLite file) a copy of the memory at ``url``; a kill leaves the old file or the new one.

    Whoever has ``target`` open must close it first.

    Raises:
        MemoryRecordError: there is no memory at ``url``.
    """
    scratch = target.with_name(f"{target.name}.partial")
    scratch.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with Store(url, create=False) as store:
        source = sqlite_file(url)
        if source is not None:
            with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(scratch)) as new:
                old.backup(new)
        else:
            with tempfile.TemporaryDirectory(dir=target.parent) as folder, Store(f"sqlite:///{scratch}") as copy:
                file = Path(folder) / "memory.jsonl"
                export_memory(store, file)
                import_memory(copy, file)
    remove_log(target)
    os.replace(scratch, target)


def remove_log(file: Path) -> None:
    """Remove what SQLite keeps beside ``file``: it belongs to the content that is about to be replaced."""
    for suffix in ("-wal", "-shm"):
        file.with_name(file.name + suffix).unlink(missing_ok=True)
