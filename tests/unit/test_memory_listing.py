"""Lists to leaf through: filters, words, pages; and a table of values read without its embedder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from memory.embedding import HashingEmbedder
from memory.experience import Experience, Visit
from memory.listing import Filter, list_items, list_trajectories, worlds_and_types
from memory.qtable import QTable
from memory.records import MemoryRecordError, PrincipleItem
from memory.samem_settings import SamemSettings
from memory.samem_store import learnt_from, list_states, read_state, save_barrier
from memory.store import Store
from tests.vault import PRINCIPLE, PROCEDURE, hierarchy, link, trajectory

pytestmark = pytest.mark.unit

OTHER = PrincipleItem(
    world="vault", grammar="v1", task_type="shut", condition='the "Straße" is 100% dark', guidance="take a lamp_2"
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(f"sqlite:///{tmp_path}/memory.db") as opened:
        many = [
            trajectory(number, success=number % 2 == 0, task_type="shut" if number > 2 else "open")
            for number in range(5)
        ]
        opened.add_trajectories(many)
        for of in many:
            opened.write(*hierarchy(of))
        opened.write([OTHER], [link(PROCEDURE.id, OTHER.id, many[0])])
        opened.set_status(OTHER.id, "audited", "for the test")
        yield opened


def principles(store: Store, **wanted: str) -> list[str]:
    return [stored.id for stored in list_items(store, 3, Filter(**wanted)).rows]


def test_items_by_words_whatever_their_case(store: Store) -> None:
    assert principles(store) == [PRINCIPLE.id, OTHER.id]
    assert principles(store, words="LEVER first") == [PRINCIPLE.id]
    assert principles(store, words="straße 100% LAMP_2") == [OTHER.id]
    assert principles(store, words='"straße"') == [OTHER.id]
    assert principles(store, words="lamp%2") == []  # no wildcards
    assert principles(store, words="guidance") == []  # the name of a field is no word of the text
    assert principles(store, words=OTHER.id[2:8]) == [OTHER.id]


def test_items_by_status_and_type(store: Store) -> None:
    assert principles(store, status="audited") == [OTHER.id]
    assert principles(store, status="audited", words="lever") == []
    assert principles(store, task_type="shut") == [OTHER.id]
    assert principles(store, world="elsewhere") == []
    with pytest.raises(MemoryRecordError, match="status: 'odd'"):
        principles(store, status="odd")
    assert worlds_and_types(store, 3) == (["vault"], ["shut"])
    assert worlds_and_types(store, 0) == (["vault"], ["open", "shut"])


def test_pages_of_a_list(store: Store) -> None:
    # Three of five episodes: those of lost games were not taken, since they claim success.
    first, last = (list_items(store, 1, Filter(), offset=offset, limit=2) for offset in (0, 2))
    assert (len(first.rows), len(last.rows), first.total, last.total) == (2, 1, 3, 3)
    assert not {row.id for row in first.rows} & {row.id for row in last.rows}
    found = list_items(store, 1, Filter(words="get in"), offset=2, limit=2)
    assert (len(found.rows), found.total) == (1, 3)


def test_trajectories_by_outcome_and_task(store: Store) -> None:
    def tasks(**wanted: object) -> list[str]:
        return [one.task for one in list_trajectories(store, Filter(**wanted)).rows]  # type: ignore[arg-type]

    assert tasks() == [f"task-{number}" for number in range(5)]
    assert tasks(success=False) == ["task-1", "task-3"]
    assert tasks(words="SHUT task-4") == ["task-4"]
    assert tasks(task_type="shut", success=True) == ["task-4"]
    page = list_trajectories(store, Filter(), offset=4, limit=2)
    assert ([one.task for one in page.rows], page.total) == (["task-4"], 5)


def test_values_are_read_without_an_embedder(store: Store) -> None:
    of = trajectory(0)
    table = QTable(SamemSettings(alpha=0.5, gamma=0.5, threshold=0.99), HashingEmbedder())
    visits = [
        Visit(step=0, state="before the vault", thought="pull it", rewards=(0.0,)),
        Visit(step=1, state="a door stands open", thought="walk in", rewards=(1.0,)),
    ]
    barrier = table.learn([Experience(trajectory=of.id, order="0", visits=tuple(visits), ended=True)])
    save_barrier(store, table, barrier, None)
    found = list_states(store)
    assert [(one.number, one.thoughts, one.visits, one.best) for one in found.rows] == [
        (0, 1, 1, 0.125),
        (1, 1, 1, 0.5),
    ]
    assert [one.number for one in list_states(store, words="DOOR open").rows] == [1]
    founder, thoughts = read_state(store, "main", 1)
    assert (founder.text, founder.trajectory, founder.step) == ("a door stands open", of.id, 1)
    assert [(one.founder.text, one.value, one.visits, one.verdict) for one in thoughts] == [("walk in", 0.5, 1, None)]
    told = [
        (one.state, one.thought, one.update.step, one.update.before, one.update.after)
        for one in learnt_from(store, of.id)
    ]
    assert told == [(1, "walk in", 1, 0.0, 0.5), (0, "pull it", 0, 0.0, 0.125)]
    for name, number in (("main", 2), ("other", 0)):
        with pytest.raises(MemoryRecordError, match=f"state: {number} is not in table '{name}'"):
            read_state(store, name, number)
