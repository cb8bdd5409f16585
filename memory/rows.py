"""What the store keeps beside the records, and how each kind of row is written and read, on an open connection.

Nothing here opens a transaction: :mod:`memory.store` and :mod:`memory.exchange` put these functions together.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from pydantic import JsonValue
from sqlalchemy import Connection, Row, Select, Table, func, insert, select, update

from memory import schema
from memory.ledger import COUNTS, TOTALS, Ledger, LedgerEntry, Totals, add_entry
from memory.records import ITEM_TYPES, LEVEL_NAMES, AnyItem, Link, MemoryRecordError, Status, Trajectory

JSON: TypeAlias = JsonValue
JudgementKind = Literal["audit", "validation", "harm"]

_DECISIONS = {"audit": "decision", "harm": "harmful"}
"""Kinds of judgements that decide whether a predicate acts, and the field of the verdict that says so."""

CHUNK = 500
"""Rows a statement takes or gives: bounds memory, and the number of parameters."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Stored:
    """An item with what the store keeps beside it. ``reason``: why it has its status."""

    item: AnyItem
    status: Status
    reason: str
    ledger: Ledger

    @cached_property
    def id(self) -> str:
        return self.item.id


@dataclass(frozen=True)
class StatusChange:
    status: Status
    reason: str
    round: int
    time: str
    """ISO 8601, UTC."""


@dataclass(frozen=True)
class Judgement:
    item: str
    kind: JudgementKind
    verdict: dict[str, JSON]
    round: int
    time: str
    """ISO 8601, UTC."""


@dataclass(frozen=True)
class Snapshot:
    """``trajectories`` to ``judgements``: the last row of each table that it covers. ``judgements`` None: of a version
    in which a name told nothing of judgements."""

    id: str
    label: str
    time: str
    trajectories: int
    links: int
    changes: int
    judgements: int | None


@dataclass(frozen=True)
class Rejection:
    """A write that was refused.

    ``kind``: link, episode, procedure or principle; ``times``: how often, for this reason; ``time``: of the first.
    """

    id: str
    kind: str
    reason: str
    record: dict[str, JSON]
    times: int
    time: str

    @property
    def field(self) -> str:
        """The field at fault, without its position: ``evidence.quote``."""
        return re.sub(r"\[\d+\]", "", self.reason.partition(":")[0])


# ---- checks of single values


def check_trajectory(record: Trajectory) -> None:
    """Raises: MemoryRecordError: step numbers that do not rise, a number that is not finite, a NUL in a name."""
    for name in ("source", "world", "grammar", "task", "task_type"):
        plain(name, getattr(record, name))
    if not math.isfinite(record.score):
        raise MemoryRecordError(f"score: {record.score} ({record.source}); give a finite number")
    last = -1
    for number, step in enumerate(record.steps):
        if step.index <= last:
            raise MemoryRecordError(
                f"steps[{number}].index: {step.index} after {last} ({record.source}); number steps from 0 upwards"
            )
        if not math.isfinite(step.reward):
            raise MemoryRecordError(f"steps[{number}].reward: {step.reward} ({record.source}); give a finite number")
        last = step.index


def check_status(level: int, status: str, id: str) -> None:
    """Raises: MemoryRecordError: a status that there is not, or not at this level."""
    known_status(status)
    if level < 3 and status not in ("candidate", "retired"):
        raise MemoryRecordError(
            f"status: {status!r} of {LEVEL_NAMES[level]} {id}; only principles are judged: give candidate or retired"
        )


def known_status(status: str) -> str:
    if status not in get_args(Status):
        raise MemoryRecordError(f"status: {status!r}; name one of {', '.join(get_args(Status))}")
    return status


def plain(name: str, text: str) -> str:
    if "\0" in text:  # PostgreSQL has no such text
        raise MemoryRecordError(f"{name}: {text[:80]!r} holds a NUL character; remove it")
    return text


def storable(text: str) -> str:
    """Free text, which a model may have written, without what a database cannot hold (NUL, lone surrogates)."""
    return _encodable(text.replace("\0", "\ufffd"))


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()


def missing(what: str, id: str) -> MemoryRecordError:
    return MemoryRecordError(f"{what}: {id!r} is not in the memory; `saga memory list` names what is")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# ---- rows


def unpack_json(data: bytes) -> str:
    return zlib.decompress(data).decode()


def unpack_trajectory(data: bytes) -> Trajectory:
    return Trajectory.model_validate_json(zlib.decompress(data))


def insert_trajectories(connection: Connection, records: dict[str, Trajectory]) -> int:
    """Insert those, by id, that are new, and return their number.

    The steps are kept in the record, compressed: a third of a table's size, and still read in a fraction of a
    millisecond, for a trajectory is read as a whole.
    """
    known = known_ids(connection, schema.trajectories, list(records))
    rows = [
        {
            "id": id,
            **{name: getattr(record, name) for name in ("world", "grammar", "task", "task_type", "round", "status")},
            "success": record.success,
            "score": record.score,
            "length": len(record.steps),
            "record": zlib.compress(record.model_dump_json().encode(), 6),
        }
        for id, record in records.items()
        if id not in known
    ]
    if rows:
        connection.execute(insert(schema.trajectories), rows)
    return len(rows)


def find_trajectory(connection: Connection, id: str) -> Trajectory | None:
    data = connection.execute(select(schema.trajectories.c.record).where(schema.trajectories.c.id == id)).scalar()
    return None if data is None else unpack_trajectory(data)


def find_item(connection: Connection, id: str) -> AnyItem | None:
    of = schema.items.c
    row = connection.execute(select(of.level, of.record).where(of.id == id)).first()
    return None if row is None else ITEM_TYPES[row.level].model_validate_json(row.record)


def is_linked(connection: Connection, id: str) -> bool:
    return connection.execute(select(schema.links.c.seq).where(schema.links.c.id == id)).first() is not None


def stored(row: Row[Any]) -> Stored:
    totals = Totals(*(row._mapping[name] for name in TOTALS))
    return Stored(ITEM_TYPES[row.level].model_validate_json(row.record), row.status, row.reason, totals.ledger())


def read_entry(row: Row[Any]) -> LedgerEntry:
    return LedgerEntry(row.item, row.episode, row.outcome, *(row._mapping[name] for name in COUNTS))


def insert_item(connection: Connection, id: str, item: AnyItem, change: StatusChange) -> None:
    row = {
        "id": id,
        "level": item.level,
        **{name: plain(name, getattr(item, name)) for name in ("world", "grammar", "task_type")},
        "record": item.model_dump_json(),
        "status": change.status,
        "reason": storable(change.reason),
        **Totals().__dict__,
    }
    connection.execute(insert(schema.items), row)
    connection.execute(insert(schema.changes), {"item": id, **_row(change)})


def _row(record: StatusChange | Judgement | Snapshot | Rejection) -> dict[str, Any]:
    return {name: storable(value) if isinstance(value, str) else value for name, value in record.__dict__.items()}


def change_status(connection: Connection, id: str, change: StatusChange) -> None:
    connection.execute(insert(schema.changes), {"item": id, **_row(change)})
    connection.execute(
        update(schema.items).where(schema.items.c.id == id).values(status=change.status, reason=storable(change.reason))
    )


def insert_link(connection: Connection, id: str, link: Link) -> None:
    row = {"id": id, "lower": link.lower, "upper": link.upper, "relation": link.relation}
    connection.execute(insert(schema.links), {**row, "record": link.model_dump_json()})
    cited = sorted({(item.trajectory, item.step) for item in link.evidence})
    connection.execute(insert(schema.evidence), [{"trajectory": id_, "step": step, "link": id} for id_, step in cited])


def credit_entries(connection: Connection, entries: Sequence[LedgerEntry]) -> None:
    """Add entries, or put them in the place of earlier ones, and bring the items' totals up to date.

    Totals are always the entries added up in the order of their rows, so that they do not depend on how the entries
    came in, down to the last bit.
    """
    newest = {(entry.item, entry.episode): entry for entry in entries}
    episodes: dict[str, list[str]] = {}
    for item, episode in newest:
        episodes.setdefault(item, []).append(episode)
    totals = {item: _totals(connection, item) for item in episodes}
    of = schema.credits.c
    changed: set[str] = set()
    for item in episodes:
        mine = select(schema.credits).where(of.item == item)
        for row in list(where_in(connection, mine, of.episode, episodes[item])):
            entry = newest.pop((item, row.episode))
            if entry != read_entry(row):
                connection.execute(update(schema.credits).where(of.seq == row.seq).values(**entry.__dict__))
                changed.add(item)
    if newest:
        connection.execute(insert(schema.credits), [entry.__dict__ for entry in newest.values()])
    for entry in newest.values():
        totals[entry.item] = add_entry(totals[entry.item], entry)
    for item in changed:
        totals[item] = Totals()
        for row in connection.execute(select(schema.credits).where(of.item == item).order_by(of.seq)):
            totals[item] = add_entry(totals[item], read_entry(row))
    for item, total in totals.items():
        connection.execute(update(schema.items).where(schema.items.c.id == item).values(**total.__dict__))


def _totals(connection: Connection, id: str) -> Totals:
    columns = [schema.items.c[name] for name in TOTALS]
    row = connection.execute(select(*columns).where(schema.items.c.id == id)).first()
    if row is None:
        raise missing("item", id)
    return Totals(*row)


def add_judgement(connection: Connection, judgement: Judgement) -> None:
    if judgement.kind not in get_args(JudgementKind):
        raise MemoryRecordError(f"kind: {judgement.kind!r}; name one of {', '.join(get_args(JudgementKind))}")
    try:
        verdict = _encodable(json.dumps(judgement.verdict, allow_nan=False, ensure_ascii=False))
    except (TypeError, ValueError) as error:
        raise MemoryRecordError(f"verdict: {error}; give plain JSON values") from None
    connection.execute(insert(schema.judgements), {**_row(judgement), "verdict": verdict})


def present(connection: Connection, label: str = "") -> Snapshot:
    """The present content as a snapshot that is not kept yet."""
    marks = [
        connection.execute(select(func.coalesce(func.max(table.c.seq), 0))).scalar_one()
        for table in (schema.trajectories, schema.links, schema.changes, schema.judgements)
    ]
    last = connection.execute(select(schema.snapshots).order_by(schema.snapshots.c.seq.desc()).limit(1)).first()
    if last is not None and marks == [last.trajectories, last.links, last.changes, last.judgements]:
        id = str(last.id)  # nothing was written since
    else:
        id = _content_hash(connection)
    return Snapshot(id, label, now(), *marks)


def keep_snapshot(connection: Connection, snapshot: Snapshot) -> None:
    """One row for each id and label."""
    of = schema.snapshots.c
    same = select(of.seq).where(of.id == snapshot.id, of.label == snapshot.label)
    if connection.execute(same).first() is None:
        connection.execute(insert(schema.snapshots), _row(snapshot))


def reject(connection: Connection, rejection: Rejection) -> None:
    """Keep a refused write, or add to the count of the same one."""
    of = schema.rejections.c
    if is_rejected(connection, rejection):
        again = update(schema.rejections).where(of.id == rejection.id, of.reason == rejection.reason)
        connection.execute(again.values(times=of.times + rejection.times))
    else:
        connection.execute(insert(schema.rejections), {**_row(rejection), "record": json.dumps(rejection.record)})


def is_rejected(connection: Connection, rejection: Rejection) -> bool:
    of = schema.rejections.c
    same = select(of.seq).where(of.id == rejection.id, of.reason == rejection.reason)
    return connection.execute(same).first() is not None


def read_judgement(row: Row[Any]) -> Judgement:
    return Judgement(row.item, row.kind, json.loads(row.verdict), row.round, row.time)


def read_rejection(row: Row[Any]) -> Rejection:
    return Rejection(row.id, row.kind, row.reason, json.loads(row.record), row.times, row.time)


def where_in(connection: Connection, query: Select[Any], column: Any, values: Sequence[Any]) -> Iterator[Row[Any]]:
    for batch in chunks(values):
        yield from connection.execute(query.where(column.in_(batch)))


def known_ids(connection: Connection, table: Table, ids: Sequence[str]) -> set[str]:
    return {row.id for row in where_in(connection, select(table.c.id), table.c.id, ids)}


def chunks(values: Iterable[_T]) -> Iterator[list[_T]]:
    batch: list[_T] = []
    for value in values:
        batch.append(value)
        if len(batch) == CHUNK:
            yield batch
            batch = []
    if batch:
        yield batch


def _content_hash(connection: Connection) -> str:
    digest = sha256()
    for query in (
        select(schema.trajectories.c.id),
        select(schema.links.c.id),
        select(schema.items.c.id, schema.items.c.status),
    ):
        for line in sorted(" ".join(row) for row in connection.execute(query)):
            digest.update(line.encode() + b"\n")
    of = schema.judgements.c
    decided: dict[tuple[str, str], object] = {}
    for row in connection.execute(select(schema.judgements).where(of.kind.in_(_DECISIONS)).order_by(of.seq)):
        decided[row.item, row.kind] = json.loads(row.verdict).get(_DECISIONS[row.kind])
    for (item, kind), decision in sorted(decided.items()):
        digest.update(f"{item} {kind} {json.dumps(decision)}\n".encode())
    return f"s-{digest.hexdigest()[:16]}"
