"""The arms of ``saga ablate``: what each changes, and how they are played, resumed and compared."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import train.ablate
import train.trajectory
from envs.base import Task
from memory.settings import EmbedderSettings
from memory.store import Store
from tests.command import saga
from tests.gambling import Gambler, Table
from tests.vault import PRINCIPLE, hierarchy, trajectory
from train.ablate import ablate_target, base_config, play_arms
from train.arms import ARMS, arm_config, learns_anew, parse_arm, parse_arms
from train.chat import ModelLost
from train.config import Config, ConfigError, MemoryConfig
from train.rebuild import builder_settings, rebuild, relearn
from train.samem import open_states

pytestmark = pytest.mark.unit

ITEMS = [Task("household", f"easy/{number}", "put") for number in range(24)]


@pytest.fixture
def store(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/memory.db"
    with Store(url) as store:
        of = trajectory()
        store.add_trajectories([of])
        assert store.write(*hierarchy(of)).rejected == []
    return url


@pytest.fixture
def recipe(tmp_path: Path, store: str) -> str:
    file = tmp_path / "recipe.yaml"
    sections = {
        "run": {"name": "recipe"},
        "memory": {"store": store, "embedder": {"kind": "hashing"}},
        "grpo": {"tasks": "household/easy/train:0-9"},
        "eval": {"tasks": "household/easy/eval-48", "temperature": 0.4},
    }
    file.write_text(yaml.safe_dump(sections))
    return str(file)


def base(**sections: Any) -> Config:
    given = {"run": {"name": "x"}, "memory": {}, "eval": {"tasks": "household/easy/eval-48", "seeds": 2}}
    return Config.model_validate(given | sections)


# Arms


def test_every_arm_changes_what_it_says() -> None:
    shared = base(agent={"max_new_tokens": 64, "thoughts": True}, samem={"database": "values.db"})
    found = {name: arm_config(shared, name, arm) for name, arm in ARMS.items()}
    assert [name for name, config in found.items() if config.memory is None] == [
        "none",
        "act",
        "react",
        "retry",
        "reflexion",
        "samem",
        "samem-thought",
        "samem-action",
    ]
    assert {name: config.samem.store for name, config in found.items() if config.samem} == {
        "samem": "thought",
        "samem-thought": "thought",
        "samem-action": "action",
        "both": "thought",
    }
    assert {name: config.memory.mode for name, config in found.items() if config.memory} == {
        "trajectory": "trajectory",
        "direct": "direct",
        "full": "full",
        "unregulated": "full",
        "shuffled": "shuffled",
        "builder-offline": "full",
        "builder-strong": "full",
        "builder-policy": "full",
        "both": "full",
    }
    assert found["unregulated"].memory is not None
    assert found["unregulated"].memory.attempts == 0
    assert [name for name, config in found.items() if not config.agent.thoughts] == ["act"]
    assert {name: (config.eval.tries, config.agent.note_tokens) for name, config in found.items()} == dict.fromkeys(
        found, (1, 0)
    ) | {"retry": (3, 0), "reflexion": (3, 96)}


def test_an_arm_may_be_changed_further() -> None:
    name, arm = parse_arm("full+memory.budget_tokens=200+memory.attempts=1")
    assert name == "full+memory.budget_tokens=200+memory.attempts=1"
    memory = arm_config(base(), name, arm).memory
    assert memory is not None
    assert (memory.mode, memory.budget_tokens, memory.attempts) == ("full", 200, 1)
    assert (
        list(parse_arms(["full", "react"])) == list(parse_arms(["full", "none", "react"])) == ["none", "full", "react"]
    )


@pytest.mark.parametrize(
    ("arm", "shared", "message"),
    [
        ("full", {"memory": None}, "--arms full: needs a memory"),
        ("both", {}, "--arms both: needs values of thoughts"),
        ("react", {}, "agent.max_new_tokens: 32 cuts off a thought"),
        ("none+env.max_steps=3", {}, "--arms none+env.max_steps=3: changes env, which all arms share"),
        ("none+eval.seeds=3", {}, "changes eval.seeds, which all arms share"),
        ("full+memory.mode=best", {}, "memory.mode: 'best'"),
    ],
)
def test_an_arm_that_cannot_be_is_refused(arm: str, shared: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        arm_config(base(**shared), *parse_arm(arm))
    assert message in str(error.value)


def test_unknown_and_repeated_arms() -> None:
    with pytest.raises(ConfigError, match=r"'best' is none of\n  none: no memory\n"):
        parse_arms(["best"])
    with pytest.raises(ConfigError, match="full is given twice"):
        parse_arms(["full", "full"])


def test_the_help_names_every_arm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert saga(monkeypatch, "ablate", "--help") == 0
    words = capsys.readouterr().out.replace("│", " ").replace(",", " ").split()
    assert set(ARMS) - {"none"} <= {word.strip(".") for word in words}


def test_what_all_arms_share(recipe: str, tmp_path: Path) -> None:
    shared = base_config(recipe, ["agent.max_new_tokens=40"], 3)
    assert (shared.grpo, shared.eval.seeds, shared.agent.max_new_tokens) == (None, 3, 40)
    with pytest.raises(ConfigError, match=r"eval.temperature: at 0 the samples of an item would be alike"):
        base_config(recipe, ["eval.temperature=0"], 2)
    without = base_config(recipe, ["memory.store=null", f"run.dir={tmp_path}/runs"], 2).memory
    assert without is not None
    assert without.store == f"sqlite:///{tmp_path}/runs/recipe/memory.db"


# Builders


def test_a_memory_is_built_anew_from_the_same_trajectories(store: str, tmp_path: Path) -> None:
    memory = MemoryConfig(store=store, embedder=EmbedderSettings(kind="hashing"))
    settings = builder_settings("offline", base(memory=memory.model_dump()))
    url = rebuild(store, settings, memory, tmp_path / "arm")
    with Store(url, create=False) as new, Store(store, create=False) as old:
        assert [one.id for one in new.trajectories()] == [one.id for one in old.trajectories()]
        assert PRINCIPLE.id not in {stored.id for stored in new.items(3)}
        built = new.snapshot()
    assert rebuild(store, settings, memory, tmp_path / "arm") == url
    with Store(url, create=False) as again:
        assert again.snapshot() == built
    with Store(store, create=False) as old:
        old.set_status(PRINCIPLE.id, "retired", "test")
    with pytest.raises(ConfigError, match="was made of another memory"):
        rebuild(store, settings, memory, tmp_path / "arm")


def test_a_table_is_learnt_anew_where_it_is_another_one(store: str, tmp_path: Path) -> None:
    shared = base(
        agent={"thoughts": True}, samem={"database": store, "embedder": {"kind": "hashing"}}, memory={"store": store}
    )

    def config(arm: str) -> Config:
        return arm_config(shared, *parse_arm(arm))

    anew = {arm: learns_anew(shared, config(arm)) for arm in ("none", "samem", "samem-thought", "both")}
    assert not any(anew.values())
    assert not learns_anew(shared, config("samem+samem.recall=hint"))
    assert learns_anew(shared, config("samem-action"))
    assert learns_anew(shared, config("samem+samem.threshold=0.5"))
    settings = config("samem-action").samem
    assert settings is not None
    url = relearn(store, settings, tmp_path / "arm")
    states = open_states(settings.model_copy(update={"database": url}), None, tmp_path)
    assert states is not None
    assert states.provenance == {("vault", "task-0")}
    # Two actions, of which the second brought 1: a step of alpha 0.3 from 0 towards it.
    assert len(states.snapshot.values) == 2
    assert max(states.snapshot.values) == pytest.approx(0.3)
    assert relearn(store, settings, tmp_path / "arm") == url


def test_who_builds() -> None:
    model = {"url": "https://api", "model": "strong", "price_in": 2.0}
    strong = builder_settings("strong", base(memory={"builder": {"model": model}}))
    assert (strong.builder, strong.model and strong.model.model) == ("model", "strong")
    served = base(
        model={"name": "small", "engine": "server", "urls": ["http://h:1"]}, memory={"builder": {"model": model}}
    )
    own = builder_settings("policy", served)
    assert own.model is not None
    assert (own.builder, own.model.url, own.model.model) == ("model", "http://h:1", "small")
    with pytest.raises(ConfigError, match="who builds"):
        builder_settings("strong", base())
    with pytest.raises(ConfigError, match="the policy must answer at an address"):
        builder_settings("policy", base())


# The command, with a scripted agent in place of model and world


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.trajectory.os, "fsync", lambda file: None)


@pytest.fixture
def play_with(monkeypatch: pytest.MonkeyPatch) -> list[Gambler]:
    """The command plays with the last agent of this list, on ITEMS."""
    agents: list[Gambler] = []

    async def play(configs: Mapping[str, Config], tasks: Any, adapter: Any, folder: Path, digest: str) -> None:
        await play_arms(Table(), agents[-1], configs, tasks, folder, digest)  # type: ignore[arg-type]

    monkeypatch.setattr(train.ablate, "_play", play)
    monkeypatch.setattr(train.ablate, "load_task_set", lambda name, env: ITEMS)
    monkeypatch.setattr(train.ablate, "check_engine", lambda config: None)
    return agents


def never(config: Config, task: Task) -> float:
    return 0.0


def odd_ones_with_memory(config: Config, task: Task) -> float:
    """By hand: none wins nothing, with memory the items of odd number."""
    return float(config.memory is not None and int(task.id[5:]) % 2)


def run(
    recipe: str, arms: list[str], out: Path, *overrides: str, samples: int = 2, resume: bool = False
) -> dict[str, Any]:
    ablate_target(recipe, arms, list(overrides), samples, None, out, resume)
    found: dict[str, Any] = json.loads((out / "ablation.json").read_text())
    return found


def test_the_table_by_hand(
    recipe: str,
    play_with: list[Gambler],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    play_with.append(Gambler(odd_ones_with_memory))
    found = run(recipe, ["full", "shuffled"], tmp_path / "out")
    rows = {row["arm"]: row for row in found["rows"]}
    assert list(rows) == ["none", "full", "shuffled"]
    assert [row["value"] for row in rows.values()] == [0.0, 0.5, 0.5]
    assert rows["none"]["effect"] is rows["none"]["p"] is None
    assert rows["full"]["effect"] == rows["shuffled"]["effect"]
    assert rows["full"]["effect"]["difference"] == 0.5
    assert rows["full"]["effect"]["n"] == 24
    assert rows["full"]["p"] == min(1.0, 2 * rows["full"]["effect"]["p"])  # Holm: two arms
    # every lost episode ended by itself after one valid step: the wrong choice
    assert rows["none"]["failures"] == {"knowledge": 1.0, "execution": 0, "budget": 0, "invalid": 0, "fault": 0}
    assert rows["full"]["failures"]["knowledge"] == 0.5
    assert rows["full"]["tokens"] == 3
    # what is wrong with the baseline is said once
    assert [warning.split(":")[0] for warning in found["warnings"]] == [
        "100.0 % of the episodes of none scored 0 (more than 70.0 %)"
    ]
    out = " ".join(capsys.readouterr().out.split())
    assert "household/easy/eval-48: 24 items, 2 samples an arm" in out
    assert "arm success % - none (95 %) p lost K/E/B/I/F" in out
    assert "none 0.0 (0–14) – – 100/0/0/0/0" in out
    # each arm plays every item with the seeds 0 and 1
    played = Counter((job.phase, job.task.id, job.seed) for job in play_with[-1].jobs)
    assert set(played) == {(arm, task.id, seed) for arm in rows for task in ITEMS for seed in (0, 1)}
    assert set(played.values()) == {1}


def test_what_was_finished_is_not_played_again_and_arms_may_be_added(
    recipe: str, play_with: list[Gambler], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    play_with.append(Gambler(never, stop_after=60))  # 48 of none, 12 of full
    with pytest.raises(ModelLost):
        run(recipe, ["full"], out)
    with pytest.raises(ConfigError, match="go on with --resume"):
        run(recipe, ["full"], out)
    play_with.append(Gambler(never))
    run(recipe, ["full"], out, resume=True)
    assert {job.phase for job in play_with[1].jobs} == {"full"}
    played = Counter(job.id for agent in play_with for job in agent.jobs)
    # at most the episodes in flight are played twice
    assert len(played) == 96
    assert sum(played.values()) <= 96 + base_config(recipe, [], 2).agent.concurrency
    play_with.append(Gambler(never))
    run(recipe, ["full", "direct"], out, resume=True)
    assert {job.phase for job in play_with[-1].jobs} == {"direct"}
    with pytest.raises(ConfigError, match="holds another evaluation"):
        run(recipe, ["full"], out, "run.seed=1", resume=True)


def test_a_memory_of_the_items_is_refused_before_anything_is_played(
    recipe: str, store: str, play_with: list[Gambler], tmp_path: Path
) -> None:
    play_with.append(Gambler(never))
    with Store(store, create=False) as opened:
        seen = trajectory(7).model_copy(update={"world": "household", "task": "easy/3", "grammar": "alfworld-0.4"})
        opened.add_trajectories([seen])
    with pytest.raises(ConfigError, match=r"rests on episodes of 1 of its 24 tasks \(for example easy/3\)"):
        run(recipe, ["full", "trajectory"], tmp_path / "out")
    assert play_with[-1].jobs == []
    run(recipe, ["full"], tmp_path / "out")  # the hierarchy does not rest on it


def test_another_memory_is_another_ablation(recipe: str, store: str, play_with: list[Gambler], tmp_path: Path) -> None:
    play_with.append(Gambler(never))
    run(recipe, ["full"], tmp_path / "out")
    with Store(store, create=False) as opened:
        opened.set_status(PRINCIPLE.id, "retired", "test")
    with pytest.raises(ConfigError, match="or memory differ"):
        run(recipe, ["full"], tmp_path / "out", resume=True)
