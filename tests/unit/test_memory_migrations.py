"""How a database is opened: made, brought up to date with its content, or refused in one line."""

from __future__ import annotations

import sqlite3
import tomllib
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from memory import schema
from memory.exchange import export_memory
from memory.records import MemoryRecordError
from memory.store import Store
from tests.vault import PRINCIPLE, hierarchy, link, trajectory

pytestmark = pytest.mark.unit

FOLDER = Path(schema.__file__).parent / "migrations"


def config() -> Config:
    made = Config()
    made.set_main_option("script_location", str(FOLDER))
    return made


NEWER = ("rejection", "barrier", "verdict", "q_update", "thought", "state", "qtable")
"""The tables that came after the first version."""


def drop_newer(connection: Connection) -> None:
    for name in NEWER:
        connection.execute(text(f"DROP TABLE memory_{name}"))
    connection.execute(text("ALTER TABLE memory_snapshot DROP COLUMN judgements"))


def test_the_revisions_lead_to_the_tables_of_schema(tmp_path: Path) -> None:
    assert ScriptDirectory.from_config(config()).get_current_head() == schema.HEAD
    with Store(f"sqlite:///{tmp_path}/memory.db") as store, store.engine.connect() as connection:
        assert schema.revision(connection) == schema.HEAD
        context = MigrationContext.configure(connection, opts={"version_table": schema.VERSION_TABLE})
        assert compare_metadata(context, schema.metadata) == []


def test_an_older_database_is_brought_up_to_date_with_its_content(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/memory.db"
    of = trajectory()
    with Store(url) as store:
        store.add_trajectories([of])
        store.write(*hierarchy(of))
        full = store.snapshot("full")
        # What the first version left behind: its tables and its number.
        with schema.writing(store.engine) as connection:
            drop_newer(connection)
            connection.execute(text("UPDATE memory_version SET version_num = '0001'"))
    with Store(url, create=False) as store:
        with store.engine.connect() as connection:
            assert schema.revision(connection) == schema.HEAD
        assert store.trajectory(of.id) == of
        assert store.item(PRINCIPLE.id).item == PRINCIPLE
        assert store.snapshot("again") == full
        assert [(one.label, one.judgements) for one in store.snapshots()] == [("full", None), ("again", 0)]
        export_memory(store, tmp_path / "a.jsonl")  # without the older one, whose name nothing could check
        assert (tmp_path / "a.jsonl").read_text().count('"kind": "snapshot"') == 1
        store.write([], [link("p-none", PRINCIPLE.id, of)])
        assert len(store.rejections()) == 1


def test_the_first_revision_is_what_the_first_version_made(tmp_path: Path) -> None:
    """The downgraded file above is the real thing: 0001 alone makes the same tables."""
    with Store(f"sqlite:///{tmp_path}/new.db") as store, schema.writing(store.engine) as connection:
        drop_newer(connection)
    engine = store.engine
    made = config()
    old = schema.create_engine(f"sqlite:///{tmp_path}/old.db")
    with old.begin() as connection:
        made.attributes["connection"] = connection
        command.upgrade(made, "0001")
    tables = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
    with engine.connect() as first, old.connect() as second:
        assert first.execute(text(tables)).all() == second.execute(text(tables)).all()
    engine.dispose()
    old.dispose()


def test_a_newer_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/memory.db"
    with Store(url) as store, schema.writing(store.engine) as connection:
        connection.execute(text("UPDATE memory_version SET version_num = '9999'"))
    with pytest.raises(MemoryRecordError, match=r"memory.db was written by a newer version \(schema 9999; this one"):
        Store(url)
    with sqlite3.connect(tmp_path / "memory.db") as raw:
        assert raw.execute("SELECT version_num FROM memory_version").fetchall() == [("9999",)]
    raw.close()


def test_a_migration_that_fails_changes_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/memory.db"
    with Store(url) as store, schema.writing(store.engine) as connection:
        connection.execute(text("UPDATE memory_version SET version_num = '0001'"))  # but 0002's table is there
    with pytest.raises(MemoryRecordError, match="already exists"):
        Store(url)
    with sqlite3.connect(tmp_path / "memory.db") as raw:
        assert raw.execute("SELECT version_num FROM memory_version").fetchall() == [("0001",)]
    raw.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://user:secret@host/db", "mysql"),
        ("nonsense", "'nonsense' is no sqlite:///FILE or postgresql"),
        ("sqlite://", "is no sqlite:///FILE"),
        ("sqlite:///:memory:", "is no sqlite:///FILE"),
        ("postgresql://user:secret@127.0.0.1:1/db", "127.0.0.1"),
    ],
)
def test_a_url_that_leads_nowhere_is_one_line_without_the_password(url: str, message: str) -> None:
    with pytest.raises(MemoryRecordError) as raised:
        Store(url)
    assert str(raised.value).startswith("store: ")
    assert message in str(raised.value)
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_reading_makes_no_memory(tmp_path: Path) -> None:
    with pytest.raises(MemoryRecordError, match="does not exist"):
        Store(f"sqlite:///{tmp_path}/none/memory.db", create=False)
    assert list(tmp_path.iterdir()) == []
    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE mine (x)").connection.close()
    with pytest.raises(MemoryRecordError, match="holds no memory"):
        Store(f"sqlite:///{tmp_path}/other.db", create=False)
    (tmp_path / "text.db").write_text("not a database at all, but a text that is long enough to be one" * 20)
    with pytest.raises(MemoryRecordError, match="file is not a database"):
        Store(f"sqlite:///{tmp_path}/text.db")


def test_what_a_user_names(tmp_path: Path) -> None:
    assert schema.memory_url(tmp_path) == f"sqlite:///{tmp_path}/memory.db"
    assert schema.memory_url(tmp_path / "x.db") == f"sqlite:///{tmp_path}/x.db"
    assert schema.memory_url("postgresql://u@h/d") == "postgresql://u@h/d"


def test_every_file_of_the_package_is_declared() -> None:
    """What lies in a folder below is no module, and goes into a wheel only by name."""
    root = FOLDER.parents[1]
    declared = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["memory"]
    found = {path for path in FOLDER.parent.rglob("*/*") if path.is_file() and "__pycache__" not in path.parts}
    assert found == {path for pattern in declared for path in FOLDER.parent.glob(pattern)}
    assert FOLDER / "env.py" in found
