"""The store on real databases used by several processes at once: SQLite files, and a PostgreSQL server."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from sqlalchemy import text

from memory import schema
from memory.embedding import HashingEmbedder
from memory.exchange import export_memory, import_memory
from memory.experience import Experience, Visit
from memory.qtable import QTable
from memory.records import EpisodeItem, MemoryRecordError
from memory.samem_settings import SamemSettings
from memory.samem_store import load_table, read_barriers, save_barrier, table_provenance
from memory.store import LedgerEntry, Store
from memory.trace import trace_down, trace_up
from tests.integration.postgres import Server, serve
from tests.unit import test_memory_store as unit
from tests.unit import test_samem_store as samem
from tests.unit.test_memory_exchange import filled
from tests.unit.test_memory_migrations import drop_newer
from tests.unit.test_samem_exchange import learn_table
from tests.vault import PRINCIPLE, episode, hierarchy, trajectory

pytestmark = pytest.mark.integration

spawn = multiprocessing.get_context("spawn")


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    yield from serve()


@pytest.fixture
def store(server: Server) -> Iterator[Store]:
    with server.database() as url, Store(url) as opened:
        yield opened


# What holds for SQLite holds for PostgreSQL: the same tests, on the fixture above.
for module in (unit, samem):
    globals().update({name: test for name, test in vars(module).items() if name.startswith("test_")})


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/memory.db"
        return
    with request.getfixturevalue("server").database() as found:
        yield found


def write_some(url: str, first: int, count: int, ready: Event) -> None:
    """A writer: hierarchies, statuses and credits, one transaction each."""
    with Store(url) as store:
        ready.wait()
        for number in range(first, first + count):
            of = trajectory(number)
            store.add_trajectories([of])
            report = store.write(*hierarchy(of))
            assert report.rejected == []
            store.credit([LedgerEntry(PRINCIPLE.id, f"e{number}", 1.0, retrieved=1, instantiated=1)])
            store.set_status(PRINCIPLE.id, "audited" if number % 2 else "candidate", f"round {number}")


def read_all(url: str, stop: Event) -> None:
    """A reader: whatever it sees is whole, and never less than before."""
    seen = 0
    with Store(url, create=False) as store:
        while not stop.is_set():
            told = store.items(1)
            assert len(told) >= seen
            seen = len(told)
            for stored in told[-3:]:
                (link,) = store.links(upper=stored.id)  # an item is never there without what it rests on
                assert store.trajectory(link.lower).steps
            if told:
                assert trace_down(store, PRINCIPLE.id).root.children
                newest = told[-1].item
                assert isinstance(newest, EpisodeItem)
                assert trace_up(store, newest.trajectory, 1).root.children
                ledger = store.ledger(PRINCIPLE.id)
                assert ledger.retrieved == ledger.episodes_with
                assert store.item(PRINCIPLE.id).status in ("candidate", "audited")


def finished(*processes: multiprocessing.process.BaseProcess) -> list[int | None]:
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


def test_readers_go_on_while_writers_write(url: str) -> None:
    go, stop = spawn.Event(), spawn.Event()
    writers = [spawn.Process(target=write_some, args=(url, first, 40, go)) for first in (0, 1000)]
    Store(url).close()
    readers = [spawn.Process(target=read_all, args=(url, stop)) for _ in range(2)]
    for process in (*writers, *readers):
        process.start()
    go.set()
    assert finished(*writers) == [0, 0]
    stop.set()
    assert finished(*readers) == [0, 0]
    with Store(url) as store:
        assert store.ledger(PRINCIPLE.id).episodes_with == 80
        assert len(store.history(PRINCIPLE.id)) == 81
        assert len(store.items(1)) == 80
        assert {record.task for record in store.trajectories()} == {
            f"task-{number}" for first in (0, 1000) for number in range(first, first + 40)
        }


def test_processes_that_open_a_new_memory_at_once_make_one(url: str) -> None:
    go = spawn.Event()
    writers = [spawn.Process(target=write_some, args=(url, first, 1, go)) for first in (0, 10, 20)]
    go.set()
    for process in writers:
        process.start()
    assert finished(*writers) == [0, 0, 0]
    with Store(url) as store:
        assert len(store.items(1)) == 3


def test_a_killed_writer_leaves_whole_writes_behind(url: str) -> None:
    Store(url).close()
    go = spawn.Event()
    go.set()
    writer = spawn.Process(target=write_some, args=(url, 0, 100_000, go))
    writer.start()
    with Store(url) as store:
        until = time.monotonic() + 60
        while len(store.items(1)) < 20 and time.monotonic() < until:
            time.sleep(0.05)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        told = store.items(1)
        assert len(told) >= 20
        assert len(store.links()) == 3 * len(told)
        more = trajectory(200_000)
        store.add_trajectories([more])
        assert episode(more).id in store.write(*hierarchy(more)).accepted
    with Store(url, create=False) as store:
        assert len(store.items(1)) == len(told) + 1


def learn_some(url: str, batches: int, ready: Event) -> None:
    """The one that learns: a barrier at a time, each of one episode in a state of its own."""
    with Store(url) as store:
        table = QTable(SamemSettings(), HashingEmbedder())
        ready.wait()
        for number in range(batches):
            visits = (Visit(0, f"room {number} {number} {number}", "go on", (1.0,)),)
            save_barrier(store, table, table.learn([Experience(f"t-{number}", str(number), visits)]), None)


def read_tables(url: str, stop: Event) -> None:
    """One that plays: whatever it loads is a table as it stood at a barrier."""
    with Store(url, create=False) as store:
        while not stop.is_set():
            table, _ = load_table(store, SamemSettings(), HashingEmbedder())
            told = read_barriers(store)
            if table.barriers:
                assert table.snapshot().id == told[table.barriers - 1].snapshot


def test_readers_see_whole_tables_while_one_learns(url: str) -> None:
    go, stop = spawn.Event(), spawn.Event()
    Store(url).close()
    readers = [spawn.Process(target=read_tables, args=(url, stop)) for _ in range(2)]
    learner = spawn.Process(target=learn_some, args=(url, 40, go))
    for process in (learner, *readers):
        process.start()
    go.set()
    assert finished(learner) == [0]
    stop.set()
    assert finished(*readers) == [0, 0]
    with Store(url) as store:
        table, _ = load_table(store, SamemSettings(), HashingEmbedder())
        assert (table.barriers, table.episodes, sum(table.visits)) == (40, 40, 40)


def test_a_memory_moves_between_sqlite_and_postgresql(server: Server, tmp_path: Path) -> None:
    first = filled(tmp_path)
    table = learn_table(first)
    export_memory(first, tmp_path / "a.jsonl")
    with server.database() as url, Store(url) as second:
        import_memory(second, tmp_path / "a.jsonl")
        export_memory(second, tmp_path / "b.jsonl")
        assert second.snapshot() == first.snapshot()
        assert second.stats() == first.stats()
        assert second.provenance() == first.provenance()
        loaded, _ = load_table(second, table.settings, HashingEmbedder())
        assert loaded.snapshot().id == table.snapshot().id
        assert table_provenance(second) == table_provenance(first) == {("vault", "task-0"), ("vault", "task-1")}
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes()


def test_postgresql_of_another_version_or_without_a_memory(server: Server) -> None:
    with server.database() as url:
        with pytest.raises(MemoryRecordError, match="holds no memory"):
            Store(url, create=False)
        with Store(url) as store, schema.writing(store.engine) as connection:
            drop_newer(connection)
            connection.execute(text("UPDATE memory_version SET version_num = '0001'"))
        with Store(url) as store:
            assert store.rejections() == []
            with schema.writing(store.engine) as connection:
                connection.execute(text("UPDATE memory_version SET version_num = '9999'"))
        with pytest.raises(MemoryRecordError, match="written by a newer version"):
            Store(url)
    with pytest.raises(MemoryRecordError, match='database "nowhere" does not exist'):
        Store(server.url("nowhere"))
