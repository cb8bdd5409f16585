"""Episodes of this project, and outside files, as the memory's level 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memory.formats import Labels
from memory.records import MemoryRecordError
from train.ingest import is_own, outside_trajectories, run_trajectories, trajectory_of
from train.trajectory import Episode, Step, append_episode

pytestmark = pytest.mark.unit


def episode(number: int = 0, **fields: object) -> Episode:
    steps = [
        Step(
            index=0,
            observation="A room.",
            text="Thought: hm\nAction: look",
            thought="hm",
            action="look",
            result="Same.",
        ),
        Step(index=1, observation="Same.", text="I give up", action=None, valid=False, result="No action.", reward=0.5),
    ]
    values = {
        "id": f"eval/{number}",
        "phase": "eval",
        "env": "household",
        "task": "easy/3",
        "task_type": "pick",
        "seed": 1,
        "goal": "g",
        "model": "m",
        "steps": steps,
    }
    return Episode.model_validate(values | fields)


def test_own_episode() -> None:
    trajectory = trajectory_of(episode(won=True, score=1.0), "demo", round=2)
    assert (trajectory.source, trajectory.grammar, trajectory.agent) == (
        "run:demo/eval/0",
        "alfworld-0.4",
        "policy m base",
    )
    assert (trajectory.success, trajectory.score, trajectory.status, trajectory.round) == (True, 1.0, "complete", 2)
    assert [(s.thought, s.action, s.valid, s.reward) for s in trajectory.steps] == [
        ("hm", "look", True, 0.0),
        ("I give up", None, False, 0.5),
    ]


def test_a_fault_is_neither_success_nor_failure() -> None:
    trajectory = trajectory_of(episode(status="env_error", error="hung", score=-1.0), "demo")
    assert (trajectory.success, trajectory.score, trajectory.status) == (None, 0.0, "truncated")
    assert trajectory.note == "env_error: hung"


def test_run_folder_and_file(tmp_path: Path) -> None:
    file = tmp_path / "demo" / "episodes" / "eval.jsonl.gz"
    for number in range(3):
        append_episode(file, episode(number))
    assert is_own(file)
    assert [t.source for t in run_trajectories(file.parent.parent)] == [f"run:demo/eval/{n}" for n in range(3)]
    assert [t.id for t in run_trajectories(file)] == [t.id for t in run_trajectories(file.parent.parent)]
    (tmp_path / "empty").mkdir()
    with pytest.raises(MemoryRecordError, match="no episodes"):
        list(run_trajectories(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("pick_two_obj_and_place-A-None-B-1/trial_T1", "train/pick_two_obj_and_place-A-None-B-1/trial_T1"),
        (
            "look_at_obj_in_light-AlarmClock-None-DeskLamp-323/trial_T20190909_044715_250790",  # first of the manifest
            "valid_seen/look_at_obj_in_light-AlarmClock-None-DeskLamp-323/trial_T20190909_044715_250790",
        ),
        (
            "/data/json_2.1.1/valid_unseen/pick_x-A-None-B-2/trial_T2/game.tw-pddl",
            "valid_unseen/pick_x-A-None-B-2/trial_T2",
        ),
        ("alfworld_12", "alfworld_12"),
    ],
)
def test_outside_alfworld_games_get_their_official_id(tmp_path: Path, name: str, task: str) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text(json.dumps({"name": name, "result": 0, "traj": "Your task is to: x.\n> a\nNothing happens."}))
    assert not is_own(file)
    (trajectory,) = outside_trajectories(file, Labels("alfworld", "alfworld-0.3")).trajectories
    assert trajectory.task == task
    assert trajectory.steps[0].valid is False
    (other,) = outside_trajectories(file, Labels("elsewhere", "g")).trajectories
    assert (other.task, other.steps[0].valid) == (name, None)
