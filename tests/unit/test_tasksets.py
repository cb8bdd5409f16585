"""Task sets: names, ranges and frozen manifests."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.base import Task, TaskError
from envs.tasksets import (
    MANIFESTS,
    describe_task_sets,
    load_task_set,
    per_type,
    read_manifest,
    task_set_hash,
    write_manifest,
)

pytestmark = pytest.mark.unit

SCIENCEWORLD = {"name": "scienceworld"}


@pytest.mark.parametrize("file", sorted(MANIFESTS.glob("*.json")), ids=lambda file: file.stem)
def test_manifests_are_whole(file: Path) -> None:
    tasks = read_manifest(file)
    manifest = json.loads(file.read_text())
    assert file.stem == manifest["name"].replace("/", "-")
    assert {task.env for task in tasks} == {manifest["name"].split("/")[0]}
    assert len({task.id for task in tasks}) == len(tasks)
    assert task_set_hash(tasks) == manifest["sha256"]
    counts = {name: count for name, count, _ in describe_task_sets()}
    assert counts[manifest["name"]] == str(len(tasks))


def test_sizes_and_types() -> None:
    types = {file.stem: Counter(task.type for task in read_manifest(file)) for file in MANIFESTS.glob("*.json")}
    assert sum(types["alfworld-valid_seen"].values()) == 140
    assert types["alfworld-valid_unseen"] == {
        "pick_and_place_simple": 24,
        "look_at_obj_in_light": 18,
        "pick_clean_then_place_in_recep": 31,
        "pick_heat_then_place_in_recep": 23,
        "pick_cool_then_place_in_recep": 21,
        "pick_two_obj_and_place": 17,
    }
    assert set(types["alfworld-dev-30"].values()) == set(types["alfworld-train-30"].values()) == {5}
    assert len(types["scienceworld-strict-175"]) == 30
    assert sum(types["scienceworld-strict-175"].values()) == 175
    assert max(types["scienceworld-strict-175"].values()) == 6
    assert len(types["scienceworld-dev-30"]) == 30
    assert set(types["scienceworld-dev-30"].values()) == {1}
    assert len(types["scienceworld-train-90"]) == 30
    assert set(types["scienceworld-train-90"].values()) == {3}


def test_a_range_counts_from_zero_and_includes_both_ends() -> None:
    whole = load_task_set("scienceworld/strict-175", SCIENCEWORLD)
    assert len(whole) == 175
    assert whole[0] == Task("scienceworld", "boil/21", "boil")
    assert load_task_set("scienceworld/strict-175:1-2", SCIENCEWORLD) == whole[1:3]
    assert load_task_set("scienceworld/strict-175:0-174", SCIENCEWORLD) == whole


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scienceworld/strict175", "'scienceworld/strict175' is unknown; near names: scienceworld/strict-175"),
        ("scienceworld/strict-175:0-175", "range must lie within 0-174"),
        ("scienceworld/strict-175:5-4", "first number first"),
        ("scienceworld/strict-175:", "'' is no range; write scienceworld/strict-175:0-9"),
        ("scienceworld/strict-175:0-9:0-3", "'0-9:0-3' is no range"),
        ("alfworld/valid_seen", "is for env.name 'alfworld', not 'scienceworld'"),
        ("../manifests/alfworld", "is unknown"),
    ],
)
def test_bad_names_say_what_is_wrong(name: str, message: str) -> None:
    with pytest.raises(TaskError) as error:
        load_task_set(name, SCIENCEWORLD)
    assert message in str(error.value)


def test_alfworld_sets_need_the_games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    with pytest.raises(TaskError, match="ALFWORLD_DATA"):
        load_task_set("alfworld/valid_seen", {"name": "alfworld"})
    first = read_manifest(MANIFESTS / "alfworld-valid_seen.json")[0]
    game = tmp_path / "json_2.1.1" / first.id / "game.tw-pddl"
    game.parent.mkdir(parents=True)
    game.write_text("{}")
    assert load_task_set("alfworld/valid_seen:0-0", {"name": "alfworld"}) == [first]
    with pytest.raises(TaskError, match="139 of 140 games are not in the ALFWorld data"):
        load_task_set("alfworld/valid_seen", {"name": "alfworld"})


def test_jericho_lists_the_game_files(tmp_path: Path) -> None:
    for name in ("zork1.z5", "advent.Z8", "notes.txt", "a.z9"):
        (tmp_path / name).touch()
    tasks = load_task_set("jericho/all", {"name": "jericho", "folder": str(tmp_path)})
    assert tasks == [Task("jericho", "advent.Z8", "jericho"), Task("jericho", "zork1.z5", "jericho")]
    with pytest.raises(TaskError, match="holds no Z-machine game"):
        load_task_set("jericho/all", {"name": "jericho", "folder": str(tmp_path / "none")})


texts = st.text(max_size=8)
task_lists = st.lists(
    st.builds(Task, st.just("world"), texts, texts, st.none() | st.text("0123456789abcdef", min_size=1)), min_size=1
)


@given(task_lists)
def test_a_manifest_gives_back_what_was_frozen(tmp_path_factory: pytest.TempPathFactory, tasks: list[Task]) -> None:
    file = tmp_path_factory.mktemp("manifest") / "set.json"
    write_manifest(file, "world/set", tasks)
    assert read_manifest(file) == tasks


@given(task_lists, st.data())
def test_a_changed_manifest_is_refused(
    tmp_path_factory: pytest.TempPathFactory, tasks: list[Task], data: st.DataObject
) -> None:
    file = tmp_path_factory.mktemp("manifest") / "set.json"
    write_manifest(file, "world/set", tasks)
    manifest = json.loads(file.read_text())
    index = data.draw(st.integers(0, len(tasks) - 1))
    change = data.draw(st.sampled_from(["drop", "id", "type", "hash", "swap"]))
    if change == "drop":
        del manifest["items"][index]
    elif change == "swap":
        manifest["items"].append(manifest["items"].pop(index) | {"id": "new"})
    else:
        manifest["items"][index]["sha256" if change == "hash" else change] = "changed"
    file.write_text(json.dumps(manifest))
    with pytest.raises(TaskError, match="reinstall the package"):
        read_manifest(file)


@given(st.lists(st.sampled_from("abc"), min_size=1), st.integers(1, 5))
def test_per_type_takes_distinct_tasks_of_each_type(types: list[str], count: int) -> None:
    tasks = [Task("world", str(index), type_) for index, type_ in enumerate(types)]
    chosen = per_type(tasks, count)
    assert len(set(chosen)) == len(chosen)
    assert Counter(task.type for task in chosen) == {t: min(n, count) for t, n in Counter(types).items()}


def test_the_hash_is_that_of_canonical_json() -> None:
    """sha256 of '[{"id":"a/1","type":"t"},{"id":"b","sha256":"00","type":"t"}]'."""
    tasks = [Task("world", "a/1", "t"), Task("world", "b", "t", "00")]
    assert task_set_hash(tasks) == "b44e46b2edd347ce6466201f93a5910027b2b444f3a5d7cf557f58cd79c25ad2"
