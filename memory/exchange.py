"""A memory as a file: JSON lines, from which another memory of the same content can be made.

The file is UTF-8 text, gzip-compressed where its name ends in ``.gz``; one JSON object a line, told apart by ``kind``:

    header      format "saga-memory", version 2; the first line
    trajectory  id, record                      memory.records.Trajectory
    episode     id, record                      EpisodeItem
    procedure   id, record                      ProcedureItem
    principle   id, record                      PrincipleItem
    status      item, change                    memory.store.StatusChange; an item's first one follows the item's line
    link        id, record                      Link
    judgement   judgement                       memory.store.Judgement
    snapshot    id, label, time                 covers exactly the lines above it
    credit      entry                           memory.store.LedgerEntry
    rejection   rejection                       memory.store.Rejection
    qtable, state, thought, update, verdict, barrier    see memory.samem_exchange
    end         lines                           the number of lines above it; the last line

Lines stand in the order of writing. An import is one transaction: it checks every id against its record, every link
against its evidence, that every item has a supporting link, that violating what has a predicate is judged harmful with
evidence that holds, every snapshot and every table of values against its content hash, and that every update of a value
names a step that is there; it takes the file as a whole or not at all. Into a memory that is not empty it adds what is
new; an item that is known keeps the status, history and judgements that it has here, a table of values whose name is
known stays as it is here, and snapshots, which name a whole content, are left out.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import IO, Annotated, Any, Literal, cast

from pydantic import Field, TypeAdapter, ValidationError
from sqlalchemy import Connection, Select, func, select

from memory import schema
from memory.grounding import check_episode, check_link, check_predicate
from memory.ledger import LedgerEntry, check_entry
from memory.records import (
    LEVEL_NAMES,
    AnyItem,
    EpisodeItem,
    Link,
    MemoryRecordError,
    PrincipleItem,
    ProcedureItem,
    Record,
    Trajectory,
)
from memory.rows import (
    Judgement,
    Rejection,
    StatusChange,
    add_judgement,
    change_status,
    check_status,
    check_trajectory,
    credit_entries,
    find_item,
    find_trajectory,
    insert_item,
    insert_link,
    insert_trajectories,
    is_linked,
    is_rejected,
    keep_snapshot,
    present,
    read_entry,
    read_judgement,
    read_rejection,
    reject,
    unpack_json,
)
from memory.samem_exchange import SamemImport, SamemLine, samem_lines
from memory.store import Store

FORMAT = "saga-memory"
VERSION = 2
_FETCH = 500
"""Rows held at a time."""


class _Header(Record):
    kind: Literal["header"]
    format: Literal["saga-memory"]
    version: int


class _TrajectoryLine(Record):
    kind: Literal["trajectory"]
    id: str
    record: Trajectory


class _EpisodeLine(Record):
    kind: Literal["episode"]
    id: str
    record: EpisodeItem


class _ProcedureLine(Record):
    kind: Literal["procedure"]
    id: str
    record: ProcedureItem


class _PrincipleLine(Record):
    kind: Literal["principle"]
    id: str
    record: PrincipleItem


class _StatusLine(Record):
    kind: Literal["status"]
    item: str
    change: StatusChange


class _LinkLine(Record):
    kind: Literal["link"]
    id: str
    record: Link


class _SnapshotLine(Record):
    kind: Literal["snapshot"]
    id: str
    label: str
    time: str


class _CreditLine(Record):
    kind: Literal["credit"]
    entry: LedgerEntry


class _JudgementLine(Record):
    kind: Literal["judgement"]
    judgement: Judgement


class _RejectionLine(Record):
    kind: Literal["rejection"]
    rejection: Rejection


class _End(Record):
    kind: Literal["end"]
    lines: int


_Line = (
    _Header
    | _TrajectoryLine
    | _EpisodeLine
    | _ProcedureLine
    | _PrincipleLine
    | _StatusLine
    | _LinkLine
    | _SnapshotLine
    | _CreditLine
    | _JudgementLine
    | _RejectionLine
    | SamemLine
    | _End
)
_LINE: TypeAdapter[_Line] = TypeAdapter(Annotated[_Line, Field(discriminator="kind")])


# ---- export


def export_memory(store: Store, path: Path) -> dict[str, int]:
    """Write the memory to ``path`` as it stands at the start of the call; lines written by kind.

    Raises:
        MemoryRecordError: ``path`` exists, or its folder does not.
    """
    if path.exists():
        raise MemoryRecordError(f"export: {path} exists; name another file")
    if not path.parent.is_dir():
        raise MemoryRecordError(f"export: folder {path.parent} does not exist; make it first")
    counts: Counter[str] = Counter()
    scratch = path.with_name(path.name + ".part")
    with ExitStack() as stack:
        connection = stack.enter_context(store.reading())
        file: IO[bytes] = stack.enter_context(scratch.open("wb"))
        if path.suffix == ".gz":  # without a time stamp: equal memories make equal files
            zipped = gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=6, mtime=0)
            file = cast(IO[bytes], stack.enter_context(zipped))
        for kind, line in _lines(connection):
            file.write(line.encode() + b"\n")
            counts[kind] += 1
        file.write(_json({"kind": "end", "lines": counts.total()}).encode() + b"\n")
    os.replace(scratch, path)
    del counts["header"]
    return dict(counts)


def _lines(connection: Connection) -> Iterator[tuple[str, str]]:
    """(kind, line) of everything but the end."""
    yield "header", _json({"kind": "header", "format": FORMAT, "version": VERSION})
    of = schema.snapshots.c
    # Those of older versions were named in another way: nothing could check them.
    taken = connection.execute(select(schema.snapshots).where(of.judgements.is_not(None)).order_by(of.seq)).all()
    before = (0, 0, 0, 0)
    known: set[str] = set()
    for snapshot in [*taken, None]:
        until = None if snapshot is None else _marks(snapshot)
        yield from _content(connection, before, until, known)
        if snapshot is not None:
            line = {"kind": "snapshot", "id": snapshot.id, "label": snapshot.label, "time": snapshot.time}
            yield "snapshot", _json(line)
            before = _marks(snapshot)
    for row in _rows(connection, select(schema.credits).order_by(schema.credits.c.seq)):
        yield "credit", _json({"kind": "credit", "entry": read_entry(row).__dict__})
    for row in _rows(connection, select(schema.rejections).order_by(schema.rejections.c.seq)):
        yield "rejection", _json({"kind": "rejection", "rejection": read_rejection(row).__dict__})
    for kind, line in samem_lines(connection):
        yield kind, _json(line)


_Marks = tuple[int, int, int, int]
"""The last rows of trajectories, status changes, links and judgements."""


def _marks(snapshot: Any) -> _Marks:
    return snapshot.trajectories, snapshot.changes, snapshot.links, snapshot.judgements


def _content(
    connection: Connection, before: _Marks, until: _Marks | None, known: set[str]
) -> Iterator[tuple[str, str]]:
    """Trajectories, items with status changes, links and judgements between two marks; ``known``: items written so
    far."""

    def between(query: Select[Any], column: Any, index: int) -> Iterator[Any]:
        query = query.where(column > before[index]).order_by(column)
        return _rows(connection, query if until is None else query.where(column <= until[index]))

    of, change = schema.trajectories.c, schema.changes.c
    for row in between(select(of.id, of.record), of.seq, 0):
        yield "trajectory", _with_record("trajectory", row.id, unpack_json(row.record))
    joined = select(schema.changes, schema.items.c.level, schema.items.c.record).join(schema.items)
    for row in between(joined, change.seq, 1):
        if row.item not in known:
            known.add(row.item)
            yield LEVEL_NAMES[row.level], _with_record(LEVEL_NAMES[row.level], row.item, row.record)
        told = StatusChange(row.status, row.reason, row.round, row.time)
        yield "status", _json({"kind": "status", "item": row.item, "change": told.__dict__})
    for row in between(select(schema.links), schema.links.c.seq, 2):
        yield "link", _with_record("link", row.id, row.record)
    for row in between(select(schema.judgements), schema.judgements.c.seq, 3):
        yield "judgement", _json({"kind": "judgement", "judgement": read_judgement(row).__dict__})


def _rows(connection: Connection, query: Select[Any]) -> Iterator[Any]:
    yield from connection.execution_options(yield_per=_FETCH).execute(query)


def _with_record(kind: str, id: str, record: str) -> str:
    return f'{{"kind": "{kind}", "id": "{id}", "record": {record}}}'  # the record is JSON already


def _json(line: dict[str, Any]) -> str:
    return json.dumps(line, ensure_ascii=False)


# ---- import


def import_memory(store: Store, path: Path) -> dict[str, int]:
    """Add a file's content; the number of new records by kind. See the module for what is checked and kept.

    Raises:
        MemoryRecordError: a missing, cut, damaged, changed or ungrounded file: names the line. Nothing is added then.
    """
    with schema.writing(store.engine) as connection:
        importer = _Import(connection)
        number = 0
        try:
            for number, line in enumerate(_read(path), 1):
                importer.take(line, number)
            importer.finish()
        except MemoryRecordError as error:
            raise MemoryRecordError(f"{path}:{number}: {error}") from None
    return dict(importer.added)


def _read(path: Path) -> Iterator[_Line]:
    try:
        with path.open("rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
            for line in file:
                try:
                    yield _LINE.validate_json(line)
                except ValidationError as error:
                    first = error.errors()[0]
                    field = ".".join(map(str, first["loc"]))
                    raise MemoryRecordError(f"{field or 'line'}: {first['msg']}; export the memory again") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise MemoryRecordError(f"{reason}; name a file that `saga memory export` wrote") from None


class _Import:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.added: Counter[str] = Counter()
        counted = (select(func.count()).select_from(table) for table in (schema.trajectories, schema.items))
        self.first = not any(connection.execute(query).scalar_one() for query in counted)
        self.fresh: dict[str, int] = {}  # items that this file brings, with their level
        self.unsupported: set[str] = set()
        self.enforced: set[str] = set()  # fresh principles with a predicate
        self.harm: dict[str, dict[str, Any]] = {}  # newest judgement of harm of each of them
        self.pending: tuple[str, AnyItem] | None = None  # an item whose first status is the next line
        self.trajectories: dict[str, Trajectory] = {}  # read and not yet inserted
        self.credits: list[LedgerEntry] = []
        self.ended = False
        self.trajectory = lru_cache(maxsize=256)(lambda id: find_trajectory(connection, id))
        self.item = lru_cache(maxsize=4096)(lambda id: find_item(connection, id))
        self.samem = SamemImport(connection, self.trajectory, self.added)

    def take(self, line: _Line, number: int) -> None:
        if (number == 1) != isinstance(line, _Header):
            raise MemoryRecordError(f"kind: {line.kind!r}; the header, and only it, is the first line")
        if self.ended:
            raise MemoryRecordError(f"kind: {line.kind!r} after the end line; export the memory again")
        if self.pending is not None and not isinstance(line, _StatusLine):
            raise MemoryRecordError(f"kind: {line.kind!r}, but {self.pending[0]} above has no status; export again")
        if isinstance(line, _TrajectoryLine | _EpisodeLine | _ProcedureLine | _PrincipleLine | _LinkLine):
            found = line.record.id
            if line.id != found:
                raise MemoryRecordError(
                    f"id: {line.id!r}, but that of the record is {found}; it was changed: use the original"
                )
        if not isinstance(line, _TrajectoryLine):
            self._insert_trajectories()
        match line:
            case _Header():
                if line.version != VERSION:
                    raise MemoryRecordError(f"version: {line.version}; this version reads {VERSION}")
            case _TrajectoryLine():
                check_trajectory(line.record)
                self.trajectories[line.id] = line.record
                if len(self.trajectories) == _FETCH:
                    self._insert_trajectories()
            case _EpisodeLine() | _ProcedureLine() | _PrincipleLine():
                self._take_item(line.id, line.record)
            case _StatusLine():
                self._take_status(line.item, line.change)
            case _LinkLine():
                self._take_link(line.id, line.record)
            case _SnapshotLine():
                self._take_snapshot(line)
            case _CreditLine():
                check_entry(line.entry)
                self.credits.append(line.entry)
                if len(self.credits) == _FETCH:
                    self._insert_credits()
            case _JudgementLine():
                if line.judgement.item in self.fresh:
                    add_judgement(self.connection, line.judgement)
                    self.added["judgement"] += 1
                    if line.judgement.kind == "harm" and line.judgement.item in self.enforced:
                        self.harm[line.judgement.item] = line.judgement.verdict
            case _RejectionLine():
                if not is_rejected(self.connection, line.rejection):
                    reject(self.connection, line.rejection)
                    self.added["rejection"] += 1
            case _End():
                if line.lines != number - 1:
                    raise MemoryRecordError(f"lines: {line.lines}, but {number - 1} are above; export the memory again")
                self.ended = True
            case _:
                self.samem.take(line)

    def finish(self) -> None:
        if not self.ended:
            raise MemoryRecordError("the file ends here, without its end line: it was cut; export the memory again")
        self._insert_credits()
        self.samem.finish()
        if self.unsupported:
            raise MemoryRecordError(
                f"links: none in the file supports {min(self.unsupported)}; export the memory again"
            )
        for id in sorted(self.enforced):
            item = self.item(id)
            assert item is not None
            reason = check_predicate(item, self.harm.get(id), self.trajectory)
            if reason is not None:
                raise MemoryRecordError(f"{id}: {reason}")

    def _insert_trajectories(self) -> None:
        self.added["trajectory"] += insert_trajectories(self.connection, self.trajectories)
        self.trajectories = {}

    def _insert_credits(self) -> None:
        credit_entries(self.connection, self.credits)
        self.added["credit"] += len(self.credits)
        self.credits = []

    def _take_item(self, id: str, item: AnyItem) -> None:
        if isinstance(item, EpisodeItem):
            reason = check_episode(item, self.trajectory(item.trajectory))
            if reason is not None:
                raise MemoryRecordError(reason)
        self.pending = id, item

    def _take_status(self, id: str, change: StatusChange) -> None:
        if self.pending is not None:
            pending, item = self.pending
            if id != pending:
                raise MemoryRecordError(f"item: {id!r}, but the line above is {pending}; export the memory again")
            self.pending = None
            check_status(item.level, change.status, id)
            if find_item(self.connection, id) is None:
                insert_item(self.connection, id, item, change)
                self.item.cache_clear()  # it may have been looked for in vain
                self.fresh[id] = item.level
                self.unsupported.add(id)
                if isinstance(item, PrincipleItem) and item.predicate is not None:
                    self.enforced.add(id)
                self.added[LEVEL_NAMES[item.level]] += 1
        elif id in self.fresh:
            check_status(self.fresh[id], change.status, id)
            change_status(self.connection, id, change)

    def _take_link(self, id: str, link: Link) -> None:
        lower = self.trajectory(link.lower) or self.item(link.lower)
        reason = check_link(link, lower, self.item(link.upper), self.trajectory)
        if reason is not None:
            raise MemoryRecordError(reason)
        if link.relation == "supports":
            self.unsupported.discard(link.upper)
        if not is_linked(self.connection, id):
            insert_link(self.connection, id, link)
            self.added["link"] += 1

    def _take_snapshot(self, line: _SnapshotLine) -> None:
        found = present(self.connection)
        if found.id == line.id:
            keep_snapshot(self.connection, replace(found, label=line.label, time=line.time))
            self.added["snapshot"] += 1
        elif self.first:
            raise MemoryRecordError(
                f"snapshot: {line.id}, but the content above is {found.id}; export the memory again"
            )
