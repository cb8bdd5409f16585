"""Tables of values in the memory's database: one process learns, any number read.

A barrier is written in one transaction, and only if nobody else wrote one in between.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
from sqlalchemy import Connection, Row, case, delete, func, insert, select, update

from memory import schema
from memory.embedding import Embedder, Vectors
from memory.forgetting import Judge, Verdict
from memory.listing import Page
from memory.qtable import Barrier, Founder, QTable, Update
from memory.records import MemoryRecordError
from memory.rows import chunks, now, storable, where_in
from memory.samem_settings import SamemSettings
from memory.store import Store
from memory.summary import Words

DEFAULT_NAME = "main"


@dataclass(frozen=True)
class KeptTable:
    """What is kept of a table beside its content. ``words``: None: its summariser has learnt none yet."""

    key: int
    name: str
    identity: dict[str, object]
    words: Words | None
    episodes: int
    barriers: int


@dataclass(frozen=True)
class KeptBarrier:
    """A row of the table's history (see :class:`memory.qtable.Barrier`). ``updates``: their number."""

    number: int
    round: int
    episodes: int
    steps: int
    matched: int
    states: int
    thoughts: int
    updates: int
    snapshot: str
    time: str


def find_table(store: Store, name: str = DEFAULT_NAME) -> KeptTable | None:
    """The table of that name; None: there is none."""
    query = select(schema.qtables).where(schema.qtables.c.name == name)
    with store.engine.connect() as connection:
        row = connection.execute(query).first()
    return None if row is None else _kept(row)


def table_names(store: Store) -> list[str]:
    """Of the tables in ``store``, the oldest first."""
    with store.engine.connect() as connection:
        return list(connection.execute(select(schema.qtables.c.name).order_by(schema.qtables.c.id)).scalars())


def load_table(
    store: Store,
    settings: SamemSettings,
    embedder: Embedder,
    *,
    name: str = DEFAULT_NAME,
    judge: Judge | None = None,
) -> tuple[QTable, Words | None]:
    """The table as it was last written, and its summariser's words; an empty one where there is none.

    Raises:
        MemoryRecordError: it was learnt with other states or thoughts than ``settings`` describe.
    """
    table = QTable(settings, embedder, judge)
    with store.reading() as connection:
        row = connection.execute(select(schema.qtables).where(schema.qtables.c.name == name)).first()
        if row is None:
            return table, None
        kept = _kept(row)
        _check_identity(kept, settings)
        _read_states(connection, kept.key, table)
        _read_thoughts(connection, kept.key, table)
        of = schema.verdicts.c
        for found in connection.execute(select(schema.verdicts).where(of.qtable == kept.key).order_by(of.seq)):
            table.judged[found.thought] = _verdict(found)
    table.resume(kept.episodes, kept.barriers)
    return table, kept.words


def save_barrier(
    store: Store, table: QTable, barrier: Barrier, words: Words | None, *, name: str = DEFAULT_NAME
) -> None:
    """Write what ``barrier``, the table's last one, changed.

    Raises:
        MemoryRecordError: another process has learnt since the table was loaded; nothing is written.
    """
    with schema.writing(store.engine) as connection:
        key = _own_row(connection, table, barrier, words, name)
        of = schema.states.c
        first_state = connection.execute(select(func.count()).where(of.qtable == key)).scalar_one()
        first_thought = connection.execute(select(func.count()).where(schema.thoughts.c.qtable == key)).scalar_one()
        for part in chunks(range(first_state, len(table.states))):
            rows = [
                {"qtable": key, "number": number, **_founder(table.states[number])}
                | {"vector": _packed(table.state_vector(number))}
                for number in part
            ]
            connection.execute(insert(schema.states), rows)
        changed = sorted(barrier.touched | set(range(first_thought, len(table.thoughts))))
        # What changed is written anew: one statement for new and old thoughts alike.
        for part in chunks(changed):
            mine = schema.thoughts.c
            connection.execute(delete(schema.thoughts).where(mine.qtable == key, mine.number.in_(part)))
            connection.execute(insert(schema.thoughts), [_thought_row(key, table, number) for number in part])
        for updates in chunks(barrier.updates):
            rows = [{"qtable": key, "barrier": barrier.number, **item.__dict__} for item in updates]
            connection.execute(insert(schema.updates), rows)
        if barrier.verdicts:
            rows = [
                {"qtable": key, "barrier": barrier.number, **verdict.__dict__, "reason": storable(verdict.reason)}
                for verdict in barrier.verdicts
            ]
            connection.execute(insert(schema.verdicts), rows)
        numbers = ("number", "round", "episodes", "steps", "matched", "states", "thoughts", "snapshot")
        row = {field: getattr(barrier, field) for field in numbers}
        connection.execute(
            insert(schema.barriers), {"qtable": key, **row, "updates": len(barrier.updates), "time": now()}
        )


def read_barriers(store: Store, name: str = DEFAULT_NAME) -> list[KeptBarrier]:
    """The table's history, oldest first."""
    of = schema.barriers.c
    query = (
        select(*[column for column in of if column.name != "qtable"])
        .join(schema.qtables, schema.qtables.c.id == of.qtable)
        .where(schema.qtables.c.name == name)
        .order_by(of.number)
    )
    with store.engine.connect() as connection:
        return [KeptBarrier(**row._mapping) for row in connection.execute(query)]


def read_updates(
    store: Store, *, name: str = DEFAULT_NAME, thought: int | None = None, limit: int | None = None
) -> list[Update]:
    """The newest ``limit`` changes of a thought's value (None: of any), in the order in which they were made."""
    of = schema.updates.c
    query = (
        select(of.thought, of.trajectory, of.step, of.reward, of.target, of.before, of.after)
        .join(schema.qtables, schema.qtables.c.id == of.qtable)
        .where(schema.qtables.c.name == name)
        .order_by(of.seq.desc())
        .limit(limit)
    )
    if thought is not None:
        query = query.where(of.thought == thought)
    with store.engine.connect() as connection:
        return [Update(**row._mapping) for row in connection.execute(query)][::-1]


def table_provenance(store: Store, name: str = DEFAULT_NAME) -> frozenset[tuple[str, str]]:
    """(world, task) of the trajectories that the table has learnt from."""
    of = schema.trajectories.c
    query = (
        select(of.world, of.task)
        .distinct()
        .join(schema.updates, schema.updates.c.trajectory == of.id)
        .join(schema.qtables, schema.qtables.c.id == schema.updates.c.qtable)
        .where(schema.qtables.c.name == name)
    )
    with store.engine.connect() as connection:
        return frozenset((row.world, row.task) for row in connection.execute(query))


@dataclass(frozen=True)
class KeptState:
    """A state in a list. ``visits``: of all its thoughts; ``best``: their highest value; None: none was tried."""

    number: int
    founder: Founder
    thoughts: int
    visits: int
    best: float | None


@dataclass(frozen=True)
class KeptThought:
    """A thought of a state as the table has it now. ``verdict``: its last one."""

    number: int
    founder: Founder
    value: float
    visits: int
    trials: int
    led_on: int
    forgotten: bool
    verdict: Verdict | None


def list_states(
    store: Store, name: str = DEFAULT_NAME, words: str = "", *, offset: int = 0, limit: int = 50
) -> Page[KeptState]:
    """States, the most visited first; each of ``words`` must occur in a state's summary."""
    of, thought = schema.states.c, schema.thoughts.c
    tried = case((thought.visits > 0, case((thought.forgotten.is_(False), thought.value))))
    query = (
        select(
            of.number, of.text, of.trajectory, of.step, of.round,
            func.count(thought.number).label("thoughts"),
            func.coalesce(func.sum(thought.visits), 0).label("visits"),
            func.max(tried).label("best"),
        )
        .join(schema.qtables, schema.qtables.c.id == of.qtable)
        .outerjoin(schema.thoughts, (thought.qtable == of.qtable) & (thought.state == of.number))
        .where(schema.qtables.c.name == name)
        .group_by(of.number, of.text, of.trajectory, of.step, of.round)
    )  # fmt: skip
    for word in words.split():
        query = query.where(of.text.icontains(word, autoescape=True))
    with store.engine.connect() as connection:
        total = connection.execute(select(func.count()).select_from(query.subquery())).scalar_one()
        rows = connection.execute(
            query.order_by(func.coalesce(func.sum(thought.visits), 0).desc(), of.number).offset(offset).limit(limit)
        )
        return Page(
            [KeptState(row.number, _kept_founder(row), row.thoughts, row.visits, row.best) for row in rows], total
        )


def read_state(store: Store, name: str, state: int) -> tuple[Founder, list[KeptThought]]:
    """A state and its thoughts, the highest value first, forgotten ones last; no embedder is needed.

    Raises:
        MemoryRecordError: no such table or state.
    """
    with store.engine.connect() as connection:
        kept = connection.execute(select(schema.qtables.c.id).where(schema.qtables.c.name == name)).scalar()
        of = schema.states.c
        found = connection.execute(select(schema.states).where(of.qtable == kept, of.number == state)).first()
        if found is None:
            raise MemoryRecordError(
                f"state: {state} is not in table {name!r}; `saga samem policy` lists those there are"
            )
        mine, verdict = schema.thoughts.c, schema.verdicts.c
        rows = connection.execute(select(schema.thoughts).where(mine.qtable == kept, mine.state == state)).all()
        verdicts = {
            row.thought: _verdict(row)
            for row in where_in(
                connection,
                select(schema.verdicts).where(verdict.qtable == kept).order_by(verdict.seq),
                verdict.thought,
                [row.number for row in rows],
            )
        }
    thoughts = [
        KeptThought(
            row.number, _kept_founder(row), row.value, row.visits, row.trials, row.led_on, row.forgotten,
            verdicts.get(row.number),
        )
        for row in rows
    ]  # fmt: skip
    return _kept_founder(found), sorted(thoughts, key=lambda one: (one.forgotten, -one.value, one.number))


@dataclass(frozen=True)
class Learnt:
    """What a step of a trajectory taught a table: an update, and the state and the words of its thought."""

    table: str
    state: int
    thought: str
    update: Update


def learnt_from(store: Store, trajectory: str) -> list[Learnt]:
    """What the tables learnt from a trajectory, in the order in which it was learnt."""
    of, thought = schema.updates.c, schema.thoughts.c
    query = (
        select(of.thought, of.trajectory, of.step, of.reward, of.target, of.before, of.after)
        .add_columns(schema.qtables.c.name, thought.state, thought.text)
        .join(schema.qtables, schema.qtables.c.id == of.qtable)
        .join(schema.thoughts, (thought.qtable == of.qtable) & (thought.number == of.thought))
        .where(of.trajectory == trajectory)
        .order_by(of.seq)
    )
    with store.engine.connect() as connection:
        return [Learnt(row.name, row.state, row.text, Update(*row[:7])) for row in connection.execute(query)]


def learnt_trajectories(store: Store, name: str = DEFAULT_NAME) -> set[str]:
    """Ids of the trajectories that the table has learnt from."""
    of = schema.updates.c
    query = (
        select(of.trajectory)
        .distinct()
        .join(schema.qtables, schema.qtables.c.id == of.qtable)
        .where(schema.qtables.c.name == name)
    )
    with store.engine.connect() as connection:
        return set(connection.execute(query).scalars())


# ---- rows


def _own_row(connection: Connection, table: QTable, barrier: Barrier, words: Words | None, name: str) -> int:
    """The key of the table's row, made or brought up to date."""
    content = {
        "words": "null" if words is None else words.model_dump_json(),
        "episodes": table.episodes,
        "barriers": table.barriers,
    }
    of = schema.qtables.c
    row = connection.execute(select(schema.qtables).where(of.name == name)).first()
    found = 0 if row is None else row.barriers
    if found != barrier.number:
        raise MemoryRecordError(
            f"samem table {name!r}: {found} batches are written, this one is number {barrier.number + 1}; another "
            "process has learnt meanwhile: load the table again"
        )
    if row is None:
        identity = json.dumps(table.settings.identity(), sort_keys=True)
        connection.execute(insert(schema.qtables), {"name": name, "identity": identity, **content})
        return connection.execute(select(of.id).where(of.name == name)).scalar_one()
    connection.execute(update(schema.qtables).where(of.id == row.id).values(**content))
    return int(row.id)


def _check_identity(kept: KeptTable, settings: SamemSettings) -> None:
    wanted = settings.identity()
    other = [field for field in wanted if wanted[field] != kept.identity.get(field)]
    if other:
        told = ", ".join(f"{field} {kept.identity.get(field)!r}, not {wanted[field]!r}" for field in other)
        raise MemoryRecordError(
            f"samem table {kept.name!r} was learnt with {told}; set the same, or name another table"
        )


def _kept(row: Row) -> KeptTable:
    words = None if row.words == "null" else Words.model_validate_json(row.words)
    return KeptTable(row.id, row.name, json.loads(row.identity), words, row.episodes, row.barriers)


def _read_states(connection: Connection, key: int, table: QTable) -> None:
    of = schema.states.c
    query = select(schema.states).where(of.qtable == key).order_by(of.number)
    for rows in chunks(connection.execute(query)):
        vectors = np.stack([_unpacked(row.vector) for row in rows])
        table.restore_states([Founder(row.text, row.trajectory, row.step, row.round) for row in rows], vectors)


def _read_thoughts(connection: Connection, key: int, table: QTable) -> None:
    of = schema.thoughts.c
    for row in connection.execute(select(schema.thoughts).where(of.qtable == key).order_by(of.number)):
        table.restore_thought(
            Founder(row.text, row.trajectory, row.step, row.round),
            row.state,
            None if row.vector is None else _unpacked(row.vector),
            value=row.value,
            visits=row.visits,
            trials=row.trials,
            led_on=row.led_on,
            forgotten=row.forgotten,
        )


def _kept_founder(row: Row) -> Founder:
    return Founder(row.text, row.trajectory, row.step, row.round)


def _founder(founder: Founder) -> dict[str, object]:
    return {**founder.__dict__, "text": storable(founder.text)}


def _thought_row(key: int, table: QTable, number: int) -> dict[str, object]:
    vector = table.thought_vector(number)
    return {
        "qtable": key,
        "number": number,
        "state": table.state_of[number],
        **_founder(table.thoughts[number]),
        "vector": None if vector is None else _packed(vector),
        "value": table.values[number],
        "visits": table.visits[number],
        "trials": table.trials[number],
        "led_on": table.led_on[number],
        "forgotten": number in table.forgotten,
    }


def _verdict(row: Row) -> Verdict:
    return Verdict(row.thought, row.sound, row.reason, row.judge, row.value)


def _packed(vector: Vectors) -> bytes:
    return vector.astype("<f4").tobytes()


def _unpacked(data: bytes) -> Vectors:
    return np.frombuffer(data, dtype="<f4").astype(np.float32)
