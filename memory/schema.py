"""The tables of a memory, and how a database is opened: SQLite (WAL) by default, PostgreSQL by URL.

Nothing is ever deleted, and only statuses, ledgers, counters and learnt values change: a snapshot can therefore be kept
as three marks (the last trajectory, link and status change that it covers). Tables are made and changed by Alembic only
(``memory/migrations``); what stands here is what the newest revision leads to, and a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Engine,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    create_engine,
    event,
    inspect,
    text,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from memory.records import MemoryRecordError

HEAD = "0004"
"""The newest revision in ``memory/migrations/versions``."""

VERSION_TABLE = "memory_version"

BUSY_SECONDS = 60
"""How long a writer waits for another one (SQLite)."""

_LOCK_KEY = 0x5A6A
"""PostgreSQL advisory lock that writers hold: sequence numbers are then given in the order of commits."""

metadata = MetaData()
_Seq = BigInteger().with_variant(Integer, "sqlite")  # only INTEGER is SQLite's rowid

trajectories = Table(
    "memory_trajectory",
    metadata,
    Column("seq", _Seq, primary_key=True, autoincrement=True),
    Column("id", String, nullable=False, unique=True),
    Column("world", String, nullable=False),
    Column("grammar", String, nullable=False),
    Column("task", String, nullable=False),
    Column("task_type", String, nullable=False),
    Column("round", Integer, nullable=False),
    Column("status", String, nullable=False),
    Column("success", Boolean),
    Column("score", Float, nullable=False),
    Column("length", Integer, nullable=False),  # steps
    Column("record", LargeBinary, nullable=False),  # zlib of the record's JSON
)

items = Table(
    "memory_item",
    metadata,
    Column("seq", _Seq, primary_key=True, autoincrement=True),
    Column("id", String, nullable=False, unique=True),
    Column("level", Integer, nullable=False),
    Column("world", String, nullable=False),
    Column("grammar", String, nullable=False),
    Column("task_type", String, nullable=False),
    Column("record", Text, nullable=False),  # JSON
    # The newest row of memory_change, repeated here so that a list of items needs no join.
    Column("status", String, nullable=False),
    Column("reason", Text, nullable=False),
    # The sum of the item's rows in memory_credit.
    Column("retrieved", Integer, nullable=False),
    Column("instantiated", Integer, nullable=False),
    Column("suppressed", Integer, nullable=False),
    Column("followed", Integer, nullable=False),
    Column("violated", Integer, nullable=False),
    Column("episodes_with", Integer, nullable=False),
    Column("sum_with", Float, nullable=False),
    Column("episodes_without", Integer, nullable=False),
    Column("sum_without", Float, nullable=False),
    Index("memory_item_level", "level", "status"),
)

changes = Table(
    "memory_change",
    metadata,
    Column("seq", _Seq, primary_key=True, autoincrement=True),
    Column("item", String, ForeignKey("memory_item.id"), nullable=False),
    Column("status", String, nullable=False),
    Column("reason", Text, nullable=False),
    Column("round", Integer, nullable=False),
    Column("time", String, nullable=False),
    Index("memory_change_item", "item"),
)

links = Table(
    "memory_link",
    metadata,
    Column("seq", _Seq, primary_key=True, autoincrement=True),
    Column("id", String, nullable=False, unique=True),
    Column("lower", String, nullable=False),  # a trajectory or an item
    Column("upper", String, ForeignKey("memory_item.id"), nullable=False),
    Column("relation", String, nullable=False),
    Column("record", Text, nullable=False),  # JSON
    Index("memory_link_lower", "lower"),
    Index("memory_link_upper", "upper", "relation"),
)

evidence = Table(
    "memory_evidence",
    metadata,
    Column("trajectory", String, ForeignKey("memory_trajectory.id"), primary_key=True),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("link", String, ForeignKey("memory_link.id"), primary_key=True),
    Index("memory_evidence_link", "link"),
)

credits = Table(
    "memory_credit",
    metadata,
    Column("seq", _Seq, primary_key=True, autoincrement=True),
    Column("item", String, ForeignKey("memory_item.id"), nullable=False),
    Column("episode", String, nullable=False),
    Column("outcome", Float),
    Column("retrieved", Integer, nullable=False),
    Column("instantiated", Integer, nullable=False),
    Column("suppressed", Integer, nullable=False),
    Column("followed", Integer, nullable=False),
    Column("violated", Integer, nullable=False),
    UniqueConstraint("item", "episode", name="memory_credit_once"),
)

judgements = Table(
    "memory_judgement",
    metadata,
    Column("seq", _Seq, primary_key=True, autoincrement=True),
    Column("item", String, ForeignKey("memory_item.id"), nullable=False),
    Column("kind", String, nullable=False),
    Column("verdict", Text, nullable=False),  # JSON
    Column("round", Integer, nullable=False),
    Column("time", String, nullable=False),
    Index("memory_judgement_item", "item"),
)

snapshots = Table(
    "memory_snapshot",
    metadata,
    Column("seq", _Seq, primary_key=True, autoincrement=True),
    Column("id", String, nullable=False),
    Column("label", String, nullable=False),
    Column("time", String, nullable=False),
    # The highest seq of each table that the snapshot covers, 0 where it was empty.
    Column("trajectories", _Seq, nullable=False),
    Column("links", _Seq, nullable=False),
    Column("changes", _Seq, nullable=False),
    Column("judgements", _Seq),  # None: made before names told of judgements
    UniqueConstraint("id", "label", name="memory_snapshot_once"),
)

rejections = Table(
    "memory_rejection",
    metadata,
    Column("seq", _Seq, primary_key=True, autoincrement=True),
    Column("id", String, nullable=False),
    Column("kind", String, nullable=False),  # link, episode, procedure or principle
    Column("reason", Text, nullable=False),
    Column("record", Text, nullable=False),  # JSON
    Column("times", Integer, nullable=False),  # writes that were rejected for this reason
    Column("time", String, nullable=False),  # of the first of them
    Index("memory_rejection_id", "id"),
)


# ---- SAMem: see memory/samem_store.py

qtables = Table(
    "memory_qtable",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("name", String, nullable=False, unique=True),
    Column("identity", Text, nullable=False),  # JSON: what a state and a thought are
    Column("words", Text, nullable=False),  # JSON: the words of the summariser
    Column("episodes", Integer, nullable=False),
    Column("barriers", Integer, nullable=False),
)

states = Table(
    "memory_state",
    metadata,
    Column("qtable", Integer, ForeignKey("memory_qtable.id"), primary_key=True, autoincrement=False),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("text", Text, nullable=False),
    Column("vector", LargeBinary, nullable=False),  # float32, little-endian
    Column("trajectory", String, nullable=False),
    Column("step", Integer, nullable=False),
    Column("round", Integer, nullable=False),
)

thoughts = Table(
    "memory_thought",
    metadata,
    Column("qtable", Integer, ForeignKey("memory_qtable.id"), primary_key=True, autoincrement=False),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("state", Integer, nullable=False),
    Column("text", Text, nullable=False),
    Column("vector", LargeBinary),  # None: told apart by its words alone
    Column("trajectory", String, nullable=False),
    Column("step", Integer, nullable=False),
    Column("round", Integer, nullable=False),
    Column("value", Float, nullable=False),
    Column("visits", Integer, nullable=False),
    Column("trials", Integer, nullable=False),
    Column("led_on", Integer, nullable=False),
    Column("forgotten", Boolean, nullable=False),
    Index("memory_thought_state", "qtable", "state"),
)

updates = Table(
    "memory_q_update",
    metadata,
    Column("seq", _Seq, primary_key=True, autoincrement=True),
    Column("qtable", Integer, ForeignKey("memory_qtable.id"), nullable=False),
    Column("barrier", Integer, nullable=False),
    Column("thought", Integer, nullable=False),
    Column("trajectory", String, nullable=False),
    Column("step", Integer, nullable=False),
    Column("reward", Float, nullable=False),
    Column("target", Float, nullable=False),
    Column("before", Float, nullable=False),
    Column("after", Float, nullable=False),
    Index("memory_q_update_thought", "qtable", "thought"),
    Index("memory_q_update_trajectory", "qtable", "trajectory"),
)

verdicts = Table(
    "memory_verdict",
    metadata,
    Column("seq", _Seq, primary_key=True, autoincrement=True),
    Column("qtable", Integer, ForeignKey("memory_qtable.id"), nullable=False),
    Column("barrier", Integer, nullable=False),
    Column("thought", Integer, nullable=False),
    Column("sound", Boolean, nullable=False),
    Column("reason", Text, nullable=False),
    Column("judge", String, nullable=False),
    Column("value", Float, nullable=False),
)

barriers = Table(
    "memory_barrier",
    metadata,
    Column("qtable", Integer, ForeignKey("memory_qtable.id"), primary_key=True, autoincrement=False),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("round", Integer, nullable=False),
    Column("episodes", Integer, nullable=False),
    Column("steps", Integer, nullable=False),
    Column("matched", Integer, nullable=False),  # steps whose state was known before
    Column("states", Integer, nullable=False),
    Column("thoughts", Integer, nullable=False),
    Column("updates", Integer, nullable=False),
    Column("snapshot", String, nullable=False),
    Column("time", String, nullable=False),
)


def memory_url(where: str | Path) -> str:
    """The URL of what a user names: a URL as it is, a run folder's ``memory.db``, or an SQLite file."""
    if "://" in str(where):
        return str(where)
    path = Path(where)
    if path.is_dir():
        path /= "memory.db"
    return f"sqlite:///{path.resolve()}"


def sqlite_file(url: str) -> Path | None:
    """The file of an SQLite URL; None: it is PostgreSQL's. Raises MemoryRecordError: neither of them."""
    parsed = _parse(url)
    return Path(str(parsed.database)) if parsed.drivername == "sqlite" else None


def open_engine(url: str, *, create: bool) -> Engine:
    """An engine on a database whose schema is this version's.

    Args:
        create: make a missing SQLite file or missing tables; otherwise their absence is an error.

    Raises:
        MemoryRecordError: a URL of another kind, no database there, no memory in it, or one of a newer version.
    """
    parsed = _parse(url)
    if parsed.drivername == "sqlite":
        file = Path(str(parsed.database))
        if not create and not file.is_file():
            raise MemoryRecordError(f"store: {file} does not exist; name a memory file, a run folder or a URL")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MemoryRecordError(f"store: {file.parent}: {error.strerror}; name another folder") from None
        engine = create_engine(parsed, connect_args={"timeout": BUSY_SECONDS})
        event.listen(engine, "connect", _on_sqlite_connect)
        event.listen(engine, "begin", _on_sqlite_begin)
    else:
        engine = create_engine(parsed, pool_pre_ping=True)
    try:
        _migrate(engine, create=create)
    except DBAPIError as error:
        engine.dispose()
        reason = " ".join(str(error.orig).split())
        shown = parsed.render_as_string(hide_password=True)
        raise MemoryRecordError(
            f"store: {shown}: {reason}; name a memory file, a run folder or a postgresql:// URL"
        ) from None
    except MemoryRecordError:
        engine.dispose()
        raise
    return engine


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction that holds the writers' lock from its start; committed at the end, rolled back on an error."""
    with engine.execution_options(saga_write=True).begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
        yield connection


def revision(connection: Connection) -> str | None:
    """The schema revision of a database; None: it holds no memory."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
    return None if found is None else str(found)


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
        parsed.get_dialect()
    except (ArgumentError, NoSuchModuleError):
        parsed = None
    if parsed is not None and parsed.get_backend_name() == "sqlite" and parsed.database not in (None, "", ":memory:"):
        return parsed.set(drivername="sqlite")
    if parsed is not None and parsed.get_backend_name() == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    shown = parsed.render_as_string(hide_password=True) if parsed else url.split("@")[-1]
    raise MemoryRecordError(f"store: {shown!r} is no sqlite:///FILE or postgresql://USER@HOST/DATABASE URL")


def _on_sqlite_connect(connection: Any, record: Any) -> None:
    connection.isolation_level = None  # no BEGIN by the driver: it would come too late for reads, and not before DDL
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={1000 * BUSY_SECONDS}")
    cursor.execute("PRAGMA journal_mode=WAL")  # readers go on while one writes
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _on_sqlite_begin(connection: Connection) -> None:
    # A transaction that reads before it writes fails when another one wrote in between: writers lock at their start.
    write = connection.get_execution_options().get("saga_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _migrate(engine: Engine, *, create: bool) -> None:
    with engine.connect() as connection:
        found = revision(connection)
    if found == HEAD:
        return
    if found is None and not create:
        raise MemoryRecordError(f"store: {engine.url.render_as_string(hide_password=True)} holds no memory")
    with writing(engine) as connection:
        found = revision(connection)  # another process may have been faster
        if found == HEAD:
            return
        from alembic import command
        from alembic.config import Config
        from alembic.script import ScriptDirectory

        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
        known = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
        if found is not None and found not in known:
            raise MemoryRecordError(
                f"store: {engine.url.render_as_string(hide_password=True)} was written by a newer version "
                f"(schema {found}; this one knows up to {HEAD}); install the newer saga-agents"
            )
        config.attributes["connection"] = connection
        command.upgrade(config, HEAD)
