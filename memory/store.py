"""The store: everything that memory holds, in one database, each claim checked against its evidence when it is written.

One process writes, any number read. Trajectories, items and links are never edited or deleted; statuses and ledgers
change, and keep their history.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from sqlalchemy import Connection, Table, case, func, select

from memory import schema
from memory.grounding import check_episode, check_link, check_predicate
from memory.ledger import Ledger, LedgerEntry, check_entry
from memory.records import ITEM_TYPES, LEVEL_NAMES, AnyItem, EpisodeItem, Link, MemoryRecordError, Status, Trajectory
from memory.rows import (
    CHUNK,
    JSON,
    Judgement,
    JudgementKind,
    Rejection,
    Snapshot,
    StatusChange,
    Stored,
    add_judgement,
    change_status,
    check_status,
    check_trajectory,
    chunks,
    credit_entries,
    find_trajectory,
    insert_item,
    insert_link,
    insert_trajectories,
    keep_snapshot,
    known_status,
    missing,
    now,
    present,
    read_entry,
    read_judgement,
    read_rejection,
    reject,
    storable,
    stored,
    unpack_trajectory,
    where_in,
)

__all__ = [
    "JSON",
    "Judgement",
    "JudgementKind",
    "Ledger",
    "LedgerEntry",
    "Rejection",
    "Relation",
    "Snapshot",
    "Stats",
    "StatusChange",
    "Store",
    "Stored",
    "TrajectoryCount",
    "WriteReport",
]

Relation = Literal["supports", "contradicts"]


@dataclass(frozen=True)
class TrajectoryCount:
    """``succeeded``: those of known success; ``statuses``: trajectories by status."""

    world: str
    grammar: str
    trajectories: int
    steps: int
    succeeded: int
    statuses: dict[str, int]


@dataclass(frozen=True)
class Stats:
    """Counts of everything. ``items``: by level, then status; ``rejected``: writes by kind and the field at fault."""

    trajectories: list[TrajectoryCount]
    items: dict[int, dict[str, int]]
    links: dict[str, int]
    rejected: dict[tuple[str, str], int]
    credits: int
    judgements: dict[str, int]
    snapshots: int


@dataclass
class WriteReport:
    """What became of a write. ``accepted`` and ``known`` hold ids of items; ``rejected`` ids of items and links."""

    accepted: list[str] = field(default_factory=list)
    known: list[str] = field(default_factory=list)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    links: int = 0
    """New links."""


class Store:
    """A memory. Safe for one writing process and many readers, and for threads; no method keeps a transaction open.

    Args:
        url: ``sqlite:///path/memory.db`` or a PostgreSQL URL. The schema is created, or brought up to date.
        create: False: a database without a memory is an error instead.

    Raises:
        MemoryRecordError: no such database, or one written by a newer version.
    """

    def __init__(self, url: str, *, create: bool = True) -> None:
        self.engine = schema.open_engine(url, create=create)

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """One transaction for many queries: they all see the content of its start."""
        options = {"isolation_level": "REPEATABLE READ"} if self.engine.dialect.name == "postgresql" else {}
        with self.engine.connect().execution_options(**options) as connection:
            yield connection

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- level 0

    def add_trajectories(self, trajectories: Iterable[Trajectory]) -> int:
        """Add those whose id is new, and return their number. Committed in batches: after a failure, repeat the call.

        Raises:
            MemoryRecordError: a record that memory cannot take (see :func:`check_trajectory`).
        """
        added = 0
        for batch in chunks(trajectories):
            new = {record.id: record for record in batch}
            for record in new.values():
                check_trajectory(record)
            with schema.writing(self.engine) as connection:
                added += insert_trajectories(connection, new)
        return added

    def trajectory(self, id: str) -> Trajectory:
        """Raises: MemoryRecordError: not in the memory."""
        with self.engine.connect() as connection:
            found = find_trajectory(connection, id)
        if found is None:
            raise missing("trajectory", id)
        return found

    def trajectories(
        self,
        *,
        world: str | None = None,
        grammar: str | None = None,
        task_type: str | None = None,
        since_round: int | None = None,
    ) -> Iterator[Trajectory]:
        """In insertion order; ``since_round``: of that round or later. What is added meanwhile comes too."""
        of = schema.trajectories.c
        query = select(of.seq, of.record).order_by(of.seq).limit(CHUNK)
        for column, value in ((of.world, world), (of.grammar, grammar), (of.task_type, task_type)):
            if value is not None:
                query = query.where(column == value)
        if since_round is not None:
            query = query.where(of.round >= since_round)
        last = 0
        while True:
            with self.engine.connect() as connection:
                rows = connection.execute(query.where(of.seq > last)).all()
            for row in rows:
                yield unpack_trajectory(row.record)
            if len(rows) < CHUNK:
                return
            last = rows[-1].seq

    # ---- levels 1 to 3

    def write(
        self,
        items: Sequence[AnyItem],
        links: Sequence[Link],
        harm: Mapping[str, dict[str, JSON]] | None = None,
    ) -> WriteReport:
        """Add items and links, each only if its evidence holds (:mod:`memory.grounding`).

        A new item enters as ``candidate``, and only with a valid supporting link from the level below, in this call.
        An item that is known stays as it is, and takes new links. All of it is one transaction.

        Args:
            harm: item id -> whether violating it does harm; recorded as a judgement of each item that is new. A
                principle with a predicate is taken only if it is judged harmful, with evidence that holds.

        Raises:
            MemoryRecordError: a verdict that is no JSON.
        """
        report = WriteReport()
        with schema.writing(self.engine) as connection:
            write = _Write(connection, report, harm or {})
            write.run({item.id: item for item in items}, {link.id: link for link in links})
        return report

    def item(self, id: str) -> Stored:
        """Raises: MemoryRecordError: not in the memory."""
        with self.engine.connect() as connection:
            row = connection.execute(select(schema.items).where(schema.items.c.id == id)).first()
        if row is None:
            raise missing("item", id)
        return stored(row)

    def items(
        self,
        level: int,
        *,
        statuses: Collection[str] | None = None,
        world: str | None = None,
        grammar: str | None = None,
        task_type: str | None = None,
    ) -> list[Stored]:
        """In insertion order. ``task_type``: items of that type, and those of any type ("")."""
        if level not in ITEM_TYPES:
            raise MemoryRecordError(f"level: {level!r}; give 1 (episodes), 2 (procedures) or 3 (principles)")
        query = select(schema.items).where(schema.items.c.level == level).order_by(schema.items.c.seq)
        if statuses is not None:
            query = query.where(schema.items.c.status.in_([known_status(status) for status in statuses]))
        if world is not None:
            query = query.where(schema.items.c.world == world)
        if grammar is not None:
            query = query.where(schema.items.c.grammar == grammar)
        if task_type is not None:
            query = query.where(schema.items.c.task_type.in_(["", task_type]))
        with self.engine.connect() as connection:
            return [stored(row) for row in connection.execute(query)]

    def set_status(self, id: str, status: Status, reason: str, round: int = 0) -> None:
        """Change an item's status and keep the change in its history.

        Raises:
            MemoryRecordError: no such item, or a status that its level does not have.
        """
        with schema.writing(self.engine) as connection:
            level = connection.execute(select(schema.items.c.level).where(schema.items.c.id == id)).scalar()
            if level is None:
                raise missing("item", id)
            check_status(level, status, id)
            change_status(connection, id, StatusChange(status, reason, round, now()))

    def history(self, id: str) -> list[StatusChange]:
        """Every status that the item had, oldest first."""
        query = select(schema.changes).where(schema.changes.c.item == id).order_by(schema.changes.c.seq)
        with self.engine.connect() as connection:
            return [StatusChange(row.status, row.reason, row.round, row.time) for row in connection.execute(query)]

    def rejections(self) -> list[Rejection]:
        """Writes that were refused, in the order of their first time."""
        with self.engine.connect() as connection:
            rows = connection.execute(select(schema.rejections).order_by(schema.rejections.c.seq))
            return [read_rejection(row) for row in rows]

    def links(
        self,
        *,
        lower: str | None = None,
        upper: str | None = None,
        relation: Relation | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[Link]:
        """In insertion order, at most ``limit`` from number ``offset`` on; all links where neither end is named."""
        of = schema.links.c
        query = select(of.record).order_by(of.seq).limit(limit).offset(offset)
        for column, value in ((of.lower, lower), (of.upper, upper), (of.relation, relation)):
            if value is not None:
                query = query.where(column == value)
        with self.engine.connect() as connection:
            return [Link.model_validate_json(row.record) for row in connection.execute(query)]

    def count_links(self, uppers: Collection[str]) -> dict[str, dict[Relation, int]]:
        """The number of links into each of these items, by relation; an item without any has an empty entry."""
        of = schema.links.c
        counts: dict[str, dict[Relation, int]] = {upper: {} for upper in uppers}
        with self.engine.connect() as connection:
            query = select(of.upper, of.relation, func.count().label("links")).group_by(of.upper, of.relation)
            for row in where_in(connection, query, of.upper, list(counts)):
                counts[row.upper][row.relation] = row.links
        return counts

    def citing(self, trajectory: str, step: int | None = None) -> list[Link]:
        """The links whose evidence cites this step (None: any step) of ``trajectory``, in insertion order."""
        of = schema.evidence.c
        cited = select(of.link).where(of.trajectory == trajectory)
        if step is not None:
            cited = cited.where(of.step == step)
        query = select(schema.links.c.record).where(schema.links.c.id.in_(cited)).order_by(schema.links.c.seq)
        with self.engine.connect() as connection:
            return [Link.model_validate_json(row.record) for row in connection.execute(query)]

    def find(self, ids: Collection[str]) -> dict[str, Stored | Trajectory]:
        """The records of these ids, whatever their level; an id that is not in the memory is left out."""
        wanted = sorted(set(ids))
        with self.engine.connect() as connection:
            low = select(schema.trajectories.c.id, schema.trajectories.c.record)
            high = select(schema.items)
            return {
                **{
                    row.id: unpack_trajectory(row.record)
                    for row in where_in(connection, low, schema.trajectories.c.id, wanted)
                },
                **{row.id: stored(row) for row in where_in(connection, high, schema.items.c.id, wanted)},
            }

    # ---- utility ledger and judgements

    def credit(self, entries: Sequence[LedgerEntry]) -> None:
        """Add entries to the items' ledgers. A second entry of an item and episode takes the first one's place, so a
        repeated call changes nothing.

        Raises:
            MemoryRecordError: no such item, an outcome outside [0, 1], a negative count; then nothing is credited.
        """
        for entry in entries:
            check_entry(entry)
        with schema.writing(self.engine) as connection:
            credit_entries(connection, entries)

    def ledger(self, id: str) -> Ledger:
        """Raises: MemoryRecordError: no such item."""
        return self.item(id).ledger

    def entries(self, id: str) -> list[LedgerEntry]:
        """The item's ledger entries in the order of their first writing."""
        query = select(schema.credits).where(schema.credits.c.item == id).order_by(schema.credits.c.seq)
        with self.engine.connect() as connection:
            return [read_entry(row) for row in connection.execute(query)]

    def judge(self, id: str, kind: JudgementKind, verdict: dict[str, JSON], round: int = 0) -> None:
        """Record a judgement of an item. All are kept, the newest of a kind counts.

        Raises:
            MemoryRecordError: no such item or kind, or a verdict that is no JSON (NaN included).
        """
        judgement = Judgement(id, kind, verdict, round, now())
        with schema.writing(self.engine) as connection:
            if connection.execute(select(schema.items.c.id).where(schema.items.c.id == id)).first() is None:
                raise missing("item", id)
            add_judgement(connection, judgement)

    def judgements(self, id: str, kind: JudgementKind | None = None) -> list[Judgement]:
        """Oldest first: the last one counts."""
        query = select(schema.judgements).where(schema.judgements.c.item == id).order_by(schema.judgements.c.seq)
        if kind is not None:
            query = query.where(schema.judgements.c.kind == kind)
        with self.engine.connect() as connection:
            return [read_judgement(row) for row in connection.execute(query)]

    def last_round(self, kind: JudgementKind) -> int:
        """The highest round of a judgement of ``kind``; 0: there is none."""
        of = schema.judgements.c
        with self.engine.connect() as connection:
            return connection.execute(select(func.max(of.round)).where(of.kind == kind)).scalar_one() or 0

    # ---- snapshots and provenance

    def snapshot(self, label: str = "") -> str:
        """Name the present content: ``s-`` and 16 hex digits of the SHA-256 over what decides which item is shown and
        which blocks: the sorted ids of trajectories and links, the sorted (id, status) of items, and the sorted (id,
        kind, decision) of their newest audits and judgements of harm. Counts, which grow with every episode, are not in
        it. Equal contents have equal names, in any store."""
        with schema.writing(self.engine) as connection:
            found = present(connection, storable(label))
            keep_snapshot(connection, found)
        return found.id

    def snapshots(self) -> list[Snapshot]:
        """Oldest first; one of equal content under another label comes again."""
        with self.engine.connect() as connection:
            rows = connection.execute(select(schema.snapshots).order_by(schema.snapshots.c.seq))
            return [
                Snapshot(row.id, row.label, row.time, row.trajectories, row.links, row.changes, row.judgements)
                for row in rows
            ]

    def statuses(self, snapshot: Snapshot | None = None) -> dict[str, Status]:
        """Every item's status at a snapshot; None: now."""
        of = schema.changes.c
        newest = select(func.max(of.seq)).group_by(of.item)
        if snapshot is not None:
            newest = newest.where(of.seq <= snapshot.changes)
        query = select(of.item, of.status).where(of.seq.in_(newest)).order_by(of.seq)
        with self.engine.connect() as connection:
            return {row.item: row.status for row in connection.execute(query)}

    def counts(self, snapshot: Snapshot | None = None) -> tuple[int, int]:
        """The number of trajectories and of links at a snapshot; None: now."""
        trajectories = select(func.count()).select_from(schema.trajectories)
        links = select(func.count()).select_from(schema.links)
        if snapshot is not None:
            trajectories = trajectories.where(schema.trajectories.c.seq <= snapshot.trajectories)
            links = links.where(schema.links.c.seq <= snapshot.links)
        with self.engine.connect() as connection:
            return connection.execute(trajectories).scalar_one(), connection.execute(links).scalar_one()

    def provenance(self) -> set[tuple[str, str]]:
        """(world, task) of every trajectory that any item which is not retired rests on, through any link below it."""
        rest = select(schema.items.c.id).where(schema.items.c.status != "retired").cte("rest", recursive=True)
        rest = rest.union(select(schema.links.c.lower).join(rest, schema.links.c.upper == rest.c.id))
        cited = (
            select(schema.evidence.c.trajectory)
            .join(schema.links, schema.links.c.id == schema.evidence.c.link)
            .join(rest, schema.links.c.upper == rest.c.id)
        )
        told = select(rest.c.id)  # the lowest ends are trajectories themselves
        query = (
            select(schema.trajectories.c.world, schema.trajectories.c.task)
            .where(schema.trajectories.c.id.in_(told) | schema.trajectories.c.id.in_(cited))
            .distinct()
        )
        with self.engine.connect() as connection:
            return {(row.world, row.task) for row in connection.execute(query)}

    def validated_on(self) -> set[tuple[str, str]]:
        """(world, task) of every validation: what was tried on them decided what is in use."""
        query = (
            select(schema.items.c.world, schema.judgements.c.verdict)
            .join(schema.items, schema.items.c.id == schema.judgements.c.item)
            .where(schema.judgements.c.kind == "validation")
        )
        with self.engine.connect() as connection:
            told = [(row.world, json.loads(row.verdict).get("tasks")) for row in connection.execute(query)]
        return {(world, str(task)) for world, tasks in told if isinstance(tasks, list) for task in tasks}

    def stats(self) -> Stats:
        """Counts of everything, for the eye."""
        of = schema.trajectories.c
        by_world = select(
            of.world, of.grammar, of.status, func.count(), func.sum(of.length), func.sum(case((of.success, 1), else_=0))
        ).group_by(of.world, of.grammar, of.status)
        worlds: dict[tuple[str, str], TrajectoryCount] = {}
        with self.engine.connect() as connection:

            def grouped(table: Table, *columns: Any) -> Any:
                query = select(*columns, func.count()).select_from(table).group_by(*columns).order_by(*columns)
                return [tuple(row) for row in connection.execute(query)]

            for world, grammar, status, count, steps, succeeded in connection.execute(by_world):
                known = worlds.get((world, grammar), TrajectoryCount(world, grammar, 0, 0, 0, {}))
                worlds[world, grammar] = TrajectoryCount(
                    world,
                    grammar,
                    known.trajectories + count,
                    known.steps + int(steps),
                    known.succeeded + int(succeeded),
                    {**known.statuses, status: count},
                )
            levels: dict[int, dict[str, int]] = {level: {} for level in ITEM_TYPES}
            for level, status, count in grouped(schema.items, schema.items.c.level, schema.items.c.status):
                levels[level][status] = count
            links = dict(grouped(schema.links, schema.links.c.relation))
            kinds = dict(grouped(schema.judgements, schema.judgements.c.kind))
            ((credits,),) = grouped(schema.credits)
            ((snapshots,),) = grouped(schema.snapshots)
        rejected: dict[tuple[str, str], int] = {}
        for rejection in self.rejections():
            key = rejection.kind, rejection.field
            rejected[key] = rejected.get(key, 0) + rejection.times
        counted = sorted(worlds.values(), key=lambda count: (count.world, count.grammar))
        return Stats(counted, levels, links, rejected, credits, kinds, snapshots)


class _Write:
    """One call of :meth:`Store.write`: what is known, what was accepted so far."""

    def __init__(self, connection: Connection, report: WriteReport, harm: Mapping[str, dict[str, JSON]]) -> None:
        self.connection = connection
        self.report = report
        self.harm = harm
        self.known: dict[str, AnyItem] = {}
        self.find = lru_cache(maxsize=256)(lambda id: find_trajectory(connection, id))

    def run(self, new: dict[str, AnyItem], proposed: dict[str, Link]) -> None:
        ends = {end for link in proposed.values() for end in (link.lower, link.upper)}
        query = select(schema.items.c.id, schema.items.c.level, schema.items.c.record)
        for row in where_in(self.connection, query, schema.items.c.id, sorted(ends | new.keys())):
            self.known[row.id] = ITEM_TYPES[row.level].model_validate_json(row.record)
        self.report.known = [id for id in new if id in self.known]
        old = {
            row.id for row in where_in(self.connection, select(schema.links.c.id), schema.links.c.id, list(proposed))
        }
        unknown = {id: item for id, item in new.items() if id not in self.known}

        waiting: dict[str, dict[str, Link]] = {}  # upper -> links
        for id, link in proposed.items():
            if id not in old:
                waiting.setdefault(link.upper, {})[id] = link
        # From the bottom up: what an item rests on is accepted, or not, before the item is looked at.
        for id, item in sorted(unknown.items(), key=lambda pair: pair[1].level):
            self._item(id, item, waiting.pop(id, {}))
        for of_upper in waiting.values():
            for id, link in of_upper.items():
                self._link(id, link, self.known.get(link.upper))

    def _item(self, id: str, item: AnyItem, own: dict[str, Link]) -> None:
        reason = None
        if isinstance(item, EpisodeItem):
            reason = check_episode(item, self.find(item.trajectory))
        reasons = {link_id: self._check(link, item) for link_id, link in own.items()}
        if reason is None and not any(reasons[link] is None and own[link].relation == "supports" for link in own):
            reason = f"links: none that holds supports it from the {LEVEL_NAMES[item.level - 1]} level; cite what does"
        if reason is None:
            reason = check_predicate(item, self.harm.get(id), self.find)
        if reason is None:
            insert_item(self.connection, id, item, StatusChange("candidate", "built", item.round, now()))
            if id in self.harm:
                add_judgement(self.connection, Judgement(id, "harm", self.harm[id], item.round, now()))
            self.known[id] = item
            self.report.accepted.append(id)
        else:
            self._reject(id, item, reason)
        for link_id, link in own.items():
            why = reasons[link_id] or (f"upper: {id} was rejected" if reason else None)
            self._take(link_id, link, why)

    def _link(self, id: str, link: Link, upper: AnyItem | None) -> None:
        self._take(id, link, self._check(link, upper))

    def _check(self, link: Link, upper: AnyItem | None) -> str | None:
        lower = self.known.get(link.lower) or self.find(link.lower)
        return check_link(link, lower, upper, self.find)

    def _take(self, id: str, link: Link, reason: str | None) -> None:
        if reason is None:
            insert_link(self.connection, id, link)
            self.report.links += 1
        else:
            self._reject(id, link, reason)

    def _reject(self, id: str, record: AnyItem | Link, reason: str) -> None:
        self.report.rejected.append((id, reason))
        kind = "link" if isinstance(record, Link) else LEVEL_NAMES[record.level]
        reject(self.connection, Rejection(id, kind, reason, record.model_dump(mode="json"), 1, now()))
