"""The official games on disk: enumeration, counts, fetching. No simulator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envs import alfworld_data
from envs.alfworld_data import alfworld_tasks, check_counts, data_folder, fetch, game_file, read_footer
from envs.base import Task, TaskError

pytestmark = pytest.mark.unit


def add_game(data: Path, task_id: str, **fields: object) -> Path:
    path = data / "json_2.1.1" / task_id / "game.tw-pddl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"pddl_domain": "(define)", **fields}))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    add_game(tmp_path, "train/pick_two_obj_and_place-Mug-None-Desk-301/trial_2", solvable=True, walkthrough=["a", "b"])
    add_game(tmp_path, "train/look_at_obj_in_light-Pen-None-DeskLamp-301/trial_1", solvable=True, walkthrough=["a"])
    add_game(tmp_path, "train/pick_two_obj_and_place-Mug-None-Desk-301/trial_1", solvable=True, walkthrough=["a"])
    add_game(tmp_path, "train/pick_and_place_simple-Pen-None-Desk-301/trial_1", solvable=False, walkthrough=None)
    add_game(tmp_path, "train/pick_and_place_simple-Pen-None-Desk-302/trial_1")
    add_game(tmp_path, "train/pick_and_place_simple-AppleSliced-None-Desk-301/trial_1", solvable=True, walkthrough=[])
    add_game(
        tmp_path, "train/pick_and_place_with_movable_recep-Pen-Mug-Desk-301/trial_1", solvable=True, walkthrough=[]
    )
    (tmp_path / "json_2.1.1/train/pick_and_place_simple-Pen-None-Desk-303/trial_1").mkdir(parents=True)
    return tmp_path


def test_tasks_are_the_solvable_supported_games_in_order(data: Path) -> None:
    assert alfworld_tasks("train", data) == [
        Task("alfworld", "train/look_at_obj_in_light-Pen-None-DeskLamp-301/trial_1", "look_at_obj_in_light"),
        Task("alfworld", "train/pick_two_obj_and_place-Mug-None-Desk-301/trial_1", "pick_two_obj_and_place"),
        Task("alfworld", "train/pick_two_obj_and_place-Mug-None-Desk-301/trial_2", "pick_two_obj_and_place"),
    ]


@pytest.mark.parametrize("split", ["valid_unseen", "", "../json_2.1.1/train", "train/x"])
def test_a_split_that_is_not_there(data: Path, split: str) -> None:
    with pytest.raises(TaskError, match=r"it has: train.*ALFWORLD_DATA.*saga data alfworld"):
        alfworld_tasks(split, data)


def test_footer_in_any_order_of_keys(tmp_path: Path) -> None:
    first = add_game(tmp_path, "a/b/c", grammar="x" * 9000, solvable=True, walkthrough=["look"])
    assert read_footer(first) == {"solvable": True, "walkthrough": ["look"]}
    last = tmp_path / "game.tw-pddl"
    last.write_text(json.dumps({"walkthrough": ["look"], "solvable": True, "grammar": "x" * 9000}))
    assert read_footer(last) == {"solvable": True, "walkthrough": ["look"]}
    last.write_text("{" + "x" * 9000)
    with pytest.raises(TaskError, match="not JSON"):
        read_footer(last)


def test_data_folder_names_the_variable_and_the_remedy(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(data))
    assert data_folder() == data
    monkeypatch.setenv("ALFWORLD_DATA", str(data / "json_2.1.1"))
    with pytest.raises(
        TaskError, match=r"ALFWORLD_DATA: '.*json_2.1.1' has no folder json_2.1.1; .*saga data alfworld"
    ):
        data_folder()
    monkeypatch.delenv("ALFWORLD_DATA")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(TaskError, match="ALFWORLD_DATA: not set"):
        data_folder()


@pytest.mark.parametrize("task_id", ["", "train", "train/x/y", "train/../train", "/etc/passwd", "../../x"])
def test_a_game_that_is_not_there(data: Path, task_id: str) -> None:
    with pytest.raises(TaskError, match="<split>/<game>/<trial>"):
        game_file(data, task_id)


def test_counts_are_checked(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TaskError, match="train has 3 games, not 3553; valid_seen has 0 games, not 140; valid_unseen"):
        check_counts(data)
    monkeypatch.setattr(alfworld_data, "OFFICIAL_COUNTS", {"train": 3})
    assert check_counts(data) == {"train": 3}


def test_fetch_leaves_complete_data_alone(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alfworld_data, "OFFICIAL_COUNTS", {"train": 3})
    monkeypatch.setattr(alfworld_data.sysconfig, "get_path", lambda name: "/nowhere")
    assert fetch(data) == (data, {"train": 3})


def test_fetch_runs_the_downloader_and_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alfworld_data, "OFFICIAL_COUNTS", {"train": 1})
    monkeypatch.setattr(alfworld_data.sysconfig, "get_path", lambda name: str(tmp_path))
    script, data = tmp_path / "alfworld-download", tmp_path / "data"
    with pytest.raises(TaskError, match=r"not found at .*pip install 'saga-agents\[alfworld\]'"):
        fetch(data)
    script.write_text("raise SystemExit(3)")
    with pytest.raises(TaskError, match=r"failed with exit code 3.*train has 0 games, not 1"):
        fetch(data)
    script.write_text("")
    with pytest.raises(TaskError, match="train has 0 games, not 1; run 'saga data alfworld'"):
        fetch(data)
    # The games are there but a later part of the download fails: that part is not needed.
    script.write_text(
        "import json, pathlib, sys\n"
        "assert sys.argv[1] == '--data-dir'\n"
        "folder = pathlib.Path(sys.argv[2], 'json_2.1.1/train/pick_and_place_simple-Pen-None-Desk-1/trial')\n"
        "folder.mkdir(parents=True)\n"
        "(folder / 'game.tw-pddl').write_text(json.dumps({'solvable': True, 'walkthrough': []}))\n"
        "raise SystemExit(1)\n"
    )
    assert fetch(data) == (data, {"train": 1})
