"""The ALFWorld engine and world, on generated games and (where ALFWORLD_DATA is set) on official ones."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import textworld
from textworld.envs.pddl import PddlEnv

from envs import alfworld_engine
from envs.alfworld import AlfworldEnv, search_prior, split_opening
from envs.alfworld_data import alfworld_tasks, game_file
from envs.alfworld_engine import INVALID, AlfworldEngine
from envs.base import EnvFault, ExpertMove, Task, TaskError
from envs.household import generate, household_task

pytestmark = pytest.mark.integration

LIGHT, CLEAN, HEAT, TWO = 1, 2, 3, 5
"""Seeds of generated games: a seed's remainder by six fixes the task type."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generated games in the layout of the official data."""
    folder = tmp_path_factory.mktemp("alfworld")
    for split, seeds in {"valid_seen": (LIGHT, CLEAN, HEAT), "train": (TWO,)}.items():
        for seed in seeds:
            path = (
                folder / "json_2.1.1" / split / f"{household_task('easy', seed).type}-{seed}" / "trial" / "game.tw-pddl"
            )
            path.parent.mkdir(parents=True)
            path.write_text(generate("easy", seed))
    return folder


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAGA_CACHE", str(folder))
        yield folder


@pytest.fixture
def engine() -> Iterator[AlfworldEngine]:
    engine = AlfworldEngine()
    yield engine
    engine.close()


def task(data: Path, task_type: str) -> Task:
    return next(item for item in alfworld_tasks("valid_seen", data) if item.type == task_type)


def stock(game: Path) -> Any:
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler

    env = AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))
    env.load(str(game))
    return env


def actions_for(game: Path, seed: int) -> Iterator[tuple[str, float]]:
    """The walkthrough, then random ones: (action, or "" to take the admissible one at this fraction of the list)."""
    yield from ((action, 0.0) for action in json.loads(game.read_text())["walkthrough"])
    yield "put everything in order", 0.0
    rng = random.Random(seed)
    yield from (("", rng.random()) for _ in range(12))


def assert_equal_traces(game: Path, engine: AlfworldEngine) -> None:
    reference = stock(game)
    engine.load(game)
    state, observation = reference.reset(), engine.reset()
    for action, fraction in actions_for(game, 0):
        assert observation == state.feedback
        assert engine.admissible == state["admissible_commands"]
        assert engine.won == state["won"]
        command = action or engine.admissible[int(fraction * len(engine.admissible))]
        state, observation = reference.step(command)[0], engine.step(command)


@pytest.mark.parametrize("seed", [LIGHT, HEAT, TWO])
def test_traces_equal_the_stock_engine(seed: int, tmp_path: Path, engine: AlfworldEngine) -> None:
    game = tmp_path / "game.tw-pddl"
    game.write_text(generate("medium", seed))
    assert_equal_traces(game, engine)


@pytest.mark.skipif("ALFWORLD_DATA" not in os.environ, reason="ALFWORLD_DATA is not set")
@pytest.mark.parametrize("task_type", ["look_at_obj_in_light", "pick_two_obj_and_place"])
def test_traces_equal_the_stock_engine_on_official_games(task_type: str, engine: AlfworldEngine) -> None:
    folder = Path(os.environ["ALFWORLD_DATA"])
    assert_equal_traces(game_file(folder, task(folder, task_type).id), engine)


def test_walkthrough_wins(data: Path, engine: AlfworldEngine) -> None:
    for item in alfworld_tasks("valid_seen", data):
        engine.load(game_file(data, item.id))
        engine.reset()
        for action in engine.walkthrough:
            assert not engine.won
            assert action in engine.admissible
            assert engine.step(action) != INVALID
        assert engine.won, item.id


def test_two_engines_do_not_disturb_each_other(data: Path) -> None:
    def play(engine: AlfworldEngine, seed: int) -> Iterator[tuple[str, list[str]]]:
        game = game_file(data, alfworld_tasks("valid_seen", data)[seed].id)
        engine.load(game)
        observation = engine.reset()
        for action, fraction in actions_for(game, seed):
            yield observation, engine.admissible
            observation = engine.step(action or engine.admissible[int(fraction * len(engine.admissible))])

    first, second = AlfworldEngine(), AlfworldEngine()
    alone = [list(play(first, 0)), list(play(first, 1))]
    together: list[list[Any]] = [[], []]
    players = [play(first, 0), play(second, 1)]
    while players[0] is not None or players[1] is not None:
        for index in (0, 1):
            if players[index] is not None:
                seen = next(players[index], None)
                if seen is None:
                    players[index] = None  # type: ignore[call-overload]
                else:
                    together[index].append(seen)
    assert together == alone
    first.close()
    second.close()


def test_loading_leaves_the_process_as_it_was(data: Path, engine: AlfworldEngine) -> None:
    argv, out = sys.argv, sys.stdout
    alfworld_engine._games.clear()
    engine.load(game_file(data, alfworld_tasks("valid_seen", data)[0].id))
    assert sys.argv is argv
    assert sys.stdout is out
    assert gc.isenabled()


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_names_no_data_folder_and_closing_many_engines_is_safe(data: Path) -> None:
    game = game_file(data, alfworld_tasks("valid_seen", data)[0].id)
    code = (
        "import os; os.environ.pop('ALFWORLD_DATA', None)\n"
        "from pathlib import Path\n"
        "from envs.alfworld_engine import AlfworldEngine\n"
        "print(os.environ.get('ALFWORLD_DATA'))\n"
        "for round in range(3):\n"
        "    engines = [AlfworldEngine() for _ in range(4)]\n"
        f"    for engine in engines: engine.load(Path({str(game)!r})); engine.reset()\n"
        "    for engine in engines: engine.close(); engine.close()\n"
        "print('alive')\n"
    )
    assert run_python(code) == "None\nalive\n"


def test_kept_games_are_not_translated_again(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    game = game_file(data, task(data, "pick_heat_then_place_in_recep").id)

    def trace() -> list[Any]:
        alfworld_engine._games.clear()
        engine = AlfworldEngine(cache=tmp_path / "kept")
        engine.load(game)
        seen: list[Any] = [engine.reset(), engine.admissible]
        for action in engine.walkthrough:
            seen += [engine.step(action), engine.admissible, engine.won]
        engine.close()
        return seen

    first = trace()
    assert len(list((tmp_path / "kept").iterdir())) == 1
    monkeypatch.setattr(alfworld_engine, "_translate", lambda *_: pytest.fail("translated again"))
    assert trace() == first


def test_a_cache_that_cannot_be_written(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    alfworld_engine._games.clear()
    engine = AlfworldEngine(cache=tmp_path / "file" / "cache")
    with pytest.raises(TaskError, match="SAGA_CACHE"):
        engine.load(game_file(data, alfworld_tasks("valid_seen", data)[0].id))
    engine.close()


def test_games_that_cannot_be_played(tmp_path: Path, engine: AlfworldEngine) -> None:
    with pytest.raises(EnvFault, match="call load first"):
        engine.reset()
    path = tmp_path / "game.tw-pddl"
    with pytest.raises(TaskError, match="No such file"):
        engine.load(path)
    path.write_text("{")
    with pytest.raises(TaskError, match="not JSON"):
        engine.load(path)
    path.write_text('{"grammar": ""}')
    with pytest.raises(TaskError, match="no pddl_domain, pddl_problem in it"):
        engine.load(path)
    path.write_text('{"grammar": "", "pddl_domain": "(((", "pddl_problem": ")"}')
    with pytest.raises(EnvFault, match="cannot load this game"):
        engine.load(path)
    with pytest.raises(EnvFault, match="call load and reset first"):
        engine.step("look")


def test_expressions_of_a_game_are_not_run_as_python(tmp_path: Path, engine: AlfworldEngine) -> None:
    game = json.loads(generate("easy", LIGHT))
    game["grammar"] = game["grammar"].replace("Your task is to: ", "{open(str(1), str(2))} Your task is to: ")
    path = tmp_path / "game.tw-pddl"
    path.write_text(json.dumps(game))
    engine.load(path)
    with pytest.raises(EnvFault, match="cannot interpret the expression 'open"):
        engine.reset()


# ---- AlfworldEnv


@pytest.fixture
def env(data: Path) -> Iterator[AlfworldEnv]:
    env = AlfworldEnv(50, data)
    yield env
    env.close()
    env.close()


def test_an_episode(data: Path, env: AlfworldEnv) -> None:
    first = env.reset(task(data, "pick_heat_then_place_in_recep"))
    assert first.observation.startswith("You are in the middle of a room. Looking quickly around you, you see a ")
    assert first.observation.endswith(f"\n\nYour task is to: {first.goal}")
    assert first.goal.endswith(".")
    walkthrough = env._engine.walkthrough
    assert env.expert_steps == len(walkthrough)
    assert env.admissible() == sorted(env.admissible())
    results = [env.step(action) for action in walkthrough]
    assert [result.reward for result in results] == [0.0] * (len(walkthrough) - 1) + [1.0]
    assert results[-1].won
    assert results[-1].done
    assert not results[-1].truncated
    with pytest.raises(RuntimeError, match="over"):
        env.step("look")
    assert env.reset(task(data, "pick_heat_then_place_in_recep"), seed=7) == first


def test_put_is_not_the_engines_word(data: Path, env: AlfworldEnv) -> None:
    env.reset(task(data, "pick_heat_then_place_in_recep"))
    *before, last = env._engine.walkthrough
    for action in before:
        assert env.step(action).valid
    assert last.startswith("move ")
    thing, place = last.removeprefix("move ").split(" to ")
    for phrase in (f"put {thing} in/on {place}", f"put {thing} in {place}", "dance", ""):
        result = env.step(phrase)
        assert (result.observation, result.valid, result.won) == ("Nothing happens.", False, False)
    assert env.step(last).won


def test_step_cap(data: Path) -> None:
    env = AlfworldEnv(2, data)
    env.reset(alfworld_tasks("valid_seen", data)[0])
    assert not env.step("look").done
    last = env.step("look")
    assert (last.done, last.won, last.truncated) == (True, False, True)
    env.close()


def test_expert_wins_and_takes_over(data: Path, env: AlfworldEnv) -> None:
    for item in alfworld_tasks("valid_seen", data):
        result = env.reset(item)
        for action in ("put it down", "go to nowhere 1", "inventory"):
            env.step(action)
        while not result.done:
            move = env.expert()
            assert env.expert() == move  # asking changes nothing
            result = env.step(move.action)
            assert result.valid
        assert result.won, item.id
        assert isinstance(move, ExpertMove)


def test_prior_is_counted_over_training_walkthroughs(data: Path, cache: Path, tmp_path: Path) -> None:
    walkthrough = json.loads(game_file(data, alfworld_tasks("train", data)[0].id).read_text())["walkthrough"]
    taken = [action.removeprefix("take ").split(" from ") for action in walkthrough if action.startswith("take ")]
    kind = taken[0][0].split()[0]
    assert len(taken) == 2
    search_prior.cache_clear()
    prior = search_prior(data)
    assert list(prior) == [kind]
    assert sum(prior[kind].values()) == 2.0
    (stored,) = cache.glob("alfworld-prior-*.json")
    assert json.loads(stored.read_text()) == prior
    # Without a training split: every place that ALFWorld's own table allows.
    (tmp_path / "json_2.1.1" / "valid_seen").mkdir(parents=True)
    assert search_prior(tmp_path)["mug"]["cabinet"] == 1.0


def test_tasks_that_do_not_exist(data: Path, env: AlfworldEnv) -> None:
    with pytest.raises(TaskError, match="ALFWORLD_DATA"):
        env.reset(Task("alfworld", "valid_seen/none/none", "pick_and_place_simple"))
    item = alfworld_tasks("valid_seen", data)[0]
    content = game_file(data, item.id).read_bytes()
    pinned = Task("alfworld", item.id, item.type, hashlib.sha256(content).hexdigest())
    assert env.reset(pinned).goal
    with pytest.raises(TaskError, match="has sha256"):
        env.reset(Task("alfworld", item.id, item.type, "0" * 64))


def test_no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    with pytest.raises(TaskError, match=r"ALFWORLD_DATA.*saga data alfworld"):
        AlfworldEnv(50)


def test_split_opening() -> None:
    banner = "-= Welcome to TextWorld, ALFRED! =-\n\n"
    text = f"{banner}You are in a room, you see a bed 1.\n\nYour task is to: put a pen in desk."
    assert split_opening(text) == (
        "You are in a room, you see a bed 1.\n\nYour task is to: put a pen in desk.",
        "put a pen in desk.",
    )
