"""Tables of values as lines of a memory's file (see :mod:`memory.exchange`).

Of each table, in this order:

    qtable      name, identity, words, episodes, barriers, snapshot (the content hash of what follows)
    state       text, vector, and the step that founded it; one line a state, in the order of their numbers
    thought     state, text, vector, value and counts, and the step that founded it; likewise
    update      thought, barrier, trajectory, step, and the change
    verdict     thought, barrier, and the judgement
    barrier     number, and the counts
"""

from __future__ import annotations

import base64
import binascii
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, FiniteFloat, ValidationError
from sqlalchemy import Connection, Table, insert, select

from memory import schema
from memory.qtable import ContentHash, content_id
from memory.records import MemoryRecordError, Record, Trajectory
from memory.rows import CHUNK
from memory.samem_settings import SamemSettings
from memory.summary import Words

Number = Annotated[int, Field(ge=0)]


class QTableLine(Record):
    kind: Literal["qtable"]
    name: str
    identity: dict[str, Any]
    words: Words | None
    episodes: Number
    barriers: Number
    snapshot: str


class StateLine(Record):
    """``vector``: float32, little-endian, in base64."""

    kind: Literal["state"]
    text: str
    vector: str
    trajectory: str
    step: int
    round: int


class ThoughtLine(Record):
    kind: Literal["thought"]
    state: Number
    text: str
    vector: str | None
    trajectory: str
    step: int
    round: int
    value: FiniteFloat
    visits: Number
    trials: Number
    led_on: Number
    forgotten: bool


class UpdateLine(Record):
    kind: Literal["update"]
    barrier: Number
    thought: Number
    trajectory: str
    step: int
    reward: FiniteFloat
    target: FiniteFloat
    before: FiniteFloat
    after: FiniteFloat


class VerdictLine(Record):
    kind: Literal["verdict"]
    barrier: Number
    thought: Number
    sound: bool
    reason: str
    judge: str
    value: FiniteFloat


class BarrierLine(Record):
    kind: Literal["barrier"]
    number: Number
    round: int
    episodes: Number
    steps: Number
    matched: Number
    states: Number
    thoughts: Number
    updates: Number
    snapshot: str
    time: str


SamemLine = QTableLine | StateLine | ThoughtLine | UpdateLine | VerdictLine | BarrierLine

_PARTS = (
    ("state", schema.states, schema.states.c.number),
    ("thought", schema.thoughts, schema.thoughts.c.number),
    ("update", schema.updates, schema.updates.c.seq),
    ("verdict", schema.verdicts, schema.verdicts.c.seq),
    ("barrier", schema.barriers, schema.barriers.c.number),
)
_TABLES: dict[str, Table] = {kind: table for kind, table, _ in _PARTS}


# ---- export


def samem_lines(connection: Connection) -> Iterator[tuple[str, dict[str, Any]]]:
    """(kind, line) of every table, the oldest first."""
    for table in connection.execute(select(schema.qtables).order_by(schema.qtables.c.id)).all():
        yield (
            "qtable",
            {
                "kind": "qtable",
                "name": table.name,
                "identity": json.loads(table.identity),
                "words": json.loads(table.words),
                "episodes": table.episodes,
                "barriers": table.barriers,
                "snapshot": stored_hash(connection, table.id),
            },
        )
        for kind, part, order in _PARTS:
            left_out = {"qtable", "seq", "number"} if kind != "barrier" else {"qtable"}
            columns = [column for column in part.c if column.name not in left_out]
            query = select(*columns).where(part.c.qtable == table.id).order_by(order)
            for row in connection.execution_options(yield_per=CHUNK).execute(query):
                line = {"kind": kind, **row._mapping}
                if line.get("vector") is not None:
                    line["vector"] = base64.b64encode(line["vector"]).decode()
                yield kind, line


def stored_hash(connection: Connection, key: int) -> str:
    """The content hash of a table as it is written."""
    content = _Content()
    of, its = schema.states.c, schema.thoughts.c
    for text in connection.execute(select(of.text).where(of.qtable == key).order_by(of.number)).scalars():
        content.hash.state(text)
    query = select(its.state, its.text, its.value, its.visits, its.forgotten).where(its.qtable == key)
    for row in connection.execute(query.order_by(its.number)):
        content.thought(*row)
    return content.id


class _Content:
    """A table's content as its lines go by."""

    def __init__(self) -> None:
        self.hash = ContentHash()
        self._values, self._visits, self._forgotten = array("d"), array("q"), array("q")

    def thought(self, state: int, text: str, value: float, visits: int, forgotten: bool) -> None:
        self.hash.thought(state, text)
        if forgotten:
            self._forgotten.append(len(self._values))
        self._values.append(value)
        self._visits.append(visits)

    @property
    def id(self) -> str:
        return content_id(self.hash.founders, self._values, self._visits, self._forgotten)


# ---- import


class SamemImport:
    """Takes the lines of tables; one whose name is known here stays as it is here.

    Args:
        trajectory: the trajectory of an id, None where the memory lacks it.
        added: counts what is new, by kind.
    """

    def __init__(
        self, connection: Connection, trajectory: Callable[[str], Trajectory | None], added: Counter[str]
    ) -> None:
        self._connection = connection
        self._trajectory = trajectory
        self._added = added
        self._table: QTableLine | None = None
        self._key: int | None = None  # of a new table
        self._content = _Content()
        self._counts: Counter[str] = Counter()
        self._size = 0  # of the vectors, in bytes
        self._rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _TABLES}

    def take(self, line: SamemLine) -> None:
        """Raises MemoryRecordError: a line that does not fit those before it."""
        if isinstance(line, QTableLine):
            self.finish()
            self._begin(line)
            return
        if self._table is None:
            raise MemoryRecordError(f"kind: {line.kind!r} before any qtable; export the memory again")
        row = line.model_dump(exclude={"kind"})
        match line:
            case StateLine():
                row |= {"number": self._counts["state"], "vector": self._vector(line.vector)}
                self._content.hash.state(line.text)
            case ThoughtLine():
                if line.state >= self._counts["state"]:
                    raise MemoryRecordError(f"state: {line.state} is not in the table; export the memory again")
                vector = None if line.vector is None else self._vector(line.vector)
                row |= {"number": self._counts["thought"], "vector": vector}
                self._content.thought(line.state, line.text, line.value, line.visits, line.forgotten)
            case UpdateLine():
                self._check_thought(line.thought)
                self._check_step(line.trajectory, line.step)
            case VerdictLine():
                self._check_thought(line.thought)
        self._counts[line.kind] += 1
        if self._key is not None:
            self._rows[line.kind].append({"qtable": self._key, **row})
            if len(self._rows[line.kind]) == CHUNK:
                self._write()

    def finish(self) -> None:
        """The lines of the last table are taken. Raises MemoryRecordError: its content is not what it was."""
        if self._table is not None and self._content.id != self._table.snapshot:
            raise MemoryRecordError(
                f"snapshot: {self._table.snapshot}, but the content of samem table {self._table.name!r} is "
                f"{self._content.id}; it was changed: export the memory again"
            )
        self._write()
        if self._key is not None:
            self._added.update(self._counts)

    def _begin(self, line: QTableLine) -> None:
        self._table, self._key, self._size = line, None, 0
        self._content, self._counts = _Content(), Counter({"qtable": 1})
        try:
            identity = SamemSettings.model_validate(line.identity).identity()
        except ValidationError as error:
            raise MemoryRecordError(f"identity: {error.errors()[0]['msg']}; export the memory again") from None
        if identity != line.identity:
            raise MemoryRecordError("identity: it is not whole; export the memory again")
        of = schema.qtables.c
        if self._connection.execute(select(of.id).where(of.name == line.name)).first() is None:
            row = {
                "name": line.name,
                "identity": json.dumps(identity, sort_keys=True),
                "words": "null" if line.words is None else line.words.model_dump_json(),
                "episodes": line.episodes,
                "barriers": line.barriers,
            }
            self._connection.execute(insert(schema.qtables), row)
            self._key = self._connection.execute(select(of.id).where(of.name == line.name)).scalar_one()

    def _vector(self, text: str) -> bytes:
        """The bytes of a vector of length one, as long as the table's others."""
        try:
            data = base64.b64decode(text, validate=True)
            numbers = np.frombuffer(data, dtype="<f4")
        except (binascii.Error, ValueError):
            raise MemoryRecordError("vector: no float32 numbers in base64; export the memory again") from None
        self._size = self._size or len(data)
        if not data or len(data) != self._size or not _short(numbers):
            raise MemoryRecordError(
                f"vector: {len(numbers)} numbers that are no vector of length one like the others; export it again"
            )
        return data

    def _check_thought(self, thought: int) -> None:
        if thought >= self._counts["thought"]:
            raise MemoryRecordError(f"thought: {thought} is not in the table; export the memory again")

    def _check_step(self, id: str, step: int) -> None:
        trajectory = self._trajectory(id)
        if trajectory is None or all(one.index != step for one in trajectory.steps):
            raise MemoryRecordError(f"update: it names step {step} of {id}, which is not in the memory")

    def _write(self) -> None:
        for kind, rows in self._rows.items():
            if rows:
                self._connection.execute(insert(_TABLES[kind]), rows)
                rows.clear()


def _short(numbers: np.ndarray) -> bool:
    """Whether a vector has length one, or zero (a text without features). NaN has neither."""
    length = float(np.linalg.norm(numbers))
    return abs(length - 1) < 1e-3 or length == 0
