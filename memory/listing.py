"""Lists of records to leaf through: a page at a time, filtered and searched by the database."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import Select, Table, func, select

from memory import schema
from memory.records import Trajectory
from memory.rows import known_status, stored, unpack_trajectory
from memory.store import Store, Stored

_T = TypeVar("_T")


@dataclass(frozen=True)
class Page(Generic[_T]):
    """Some of ``total`` records."""

    rows: Sequence[_T]
    total: int


@dataclass(frozen=True)
class Filter:
    """What is listed; "" and None: of any kind. ``words``: each must occur, whatever its case."""

    words: str = ""
    status: str = ""
    world: str = ""
    task_type: str = ""
    success: bool | None = None
    """Of trajectories."""


def list_items(store: Store, level: int, wanted: Filter, *, offset: int = 0, limit: int = 50) -> Page[Stored]:
    """Items of a level in insertion order; words are looked for in their texts and ids.

    Raises:
        MemoryRecordError: a status that there is not.
    """
    of = schema.items.c
    query = select(schema.items).where(of.level == level).order_by(of.seq)
    if wanted.status:
        query = query.where(of.status == known_status(wanted.status))
    query = _scoped(query, schema.items, wanted)
    words = wanted.words.lower().split()
    if not words:
        with store.engine.connect() as connection:
            rows = [stored(row) for row in connection.execute(query.offset(offset).limit(limit))]
            return Page(rows, connection.execute(_count(query)).scalar_one())
    # The record also holds the names of its fields, and a database folds ASCII only: it narrows, this decides.
    for word in words:
        if word.isascii():
            query = query.where(
                of.record.icontains(json.dumps(word)[1:-1], autoescape=True) | of.id.icontains(word, autoescape=True)
            )
    with store.engine.connect() as connection:
        found = [
            one
            for one in map(stored, connection.execute(query))
            if all(word in f"{one.id} {one.item.text()}".lower() for word in words)
        ]
    return Page(found[offset : offset + limit], len(found))


def list_trajectories(store: Store, wanted: Filter, *, offset: int = 0, limit: int = 50) -> Page[Trajectory]:
    """Trajectories in insertion order; words are looked for in their tasks, task types and ids."""
    of = schema.trajectories.c
    query = _scoped(select(of.record).order_by(of.seq), schema.trajectories, wanted)
    if wanted.success is not None:
        query = query.where(of.success.is_(wanted.success))
    for word in wanted.words.split():
        query = query.where((of.task + " " + of.task_type + " " + of.id).icontains(word, autoescape=True))
    with store.engine.connect() as connection:
        rows = [unpack_trajectory(row.record) for row in connection.execute(query.offset(offset).limit(limit))]
        return Page(rows, connection.execute(_count(query)).scalar_one())


def worlds_and_types(store: Store, level: int) -> tuple[list[str], list[str]]:
    """The worlds, and the task types, of the records of a level (0: trajectories), for a choice."""
    table = schema.items if level else schema.trajectories
    with store.engine.connect() as connection:

        def distinct(name: str) -> list[str]:
            query = select(table.c[name]).distinct().order_by(table.c[name])
            if level:
                query = query.where(schema.items.c.level == level)
            return [value for value in connection.execute(query).scalars() if value]

        return distinct("world"), distinct("task_type")


def _scoped(query: Select, table: Table, wanted: Filter) -> Select:
    if wanted.world:
        query = query.where(table.c.world == wanted.world)
    if wanted.task_type:
        query = query.where(table.c.task_type == wanted.task_type)
    return query


def _count(query: Select) -> Select[Any]:
    return select(func.count()).select_from(query.order_by(None).subquery())
