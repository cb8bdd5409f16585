"""``saga samem`` and ``saga memory calibrate``: what they learn and print, and one error for what they cannot do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from memory.embedding import HashingEmbedder
from memory.records import MemoryRecordError, Trajectory
from memory.samem_store import DEFAULT_NAME, read_barriers
from memory.store import Store
from tests.command import error_of, saga
from tests.unit.test_samem_summary import workshop
from train.config import ConfigError, SamemConfig
from train.samem import calibrate, open_states, read_settings
from train.target import configure

pytestmark = pytest.mark.unit

Out = Callable[..., str]
HASHING = ("embedder.kind=hashing", "threshold=0.99", "thought_threshold=0.9", "alpha=0.5", "gamma=0.5")


def played(number: int, thing: str = "cup") -> Trajectory:
    """The workshop with thoughts; the last step earns."""
    base = workshop()
    steps = [
        step.model_copy(update={"thought": f"I do {step.action.replace('cup', thing)}", "reward": float(n == 7)})
        for n, step in enumerate(base.steps)
        if step.action
    ]
    texts = {"observation": base.steps[0].observation.replace("cup", thing)}
    steps[0] = steps[0].model_copy(update=texts)
    return base.model_copy(
        update={
            "source": f"made up#{number}",
            "goal": base.goal.replace("cup", thing),
            "steps": tuple(
                step.model_copy(
                    update={
                        "action": (step.action or "").replace("cup", thing),
                        "result": step.result.replace("cup", thing),
                    }
                )
                for step in steps
            ),
        }
    )


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Out:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    with Store(f"sqlite:///{tmp_path}/memory.db") as store:
        store.add_trajectories([played(0), played(1)])

    def run(*args: str) -> str:
        assert saga(monkeypatch, *args) == 0
        return capsys.readouterr().out

    return run


def test_learning_looking_and_going_on(out: Out, tmp_path: Path) -> None:
    told = out("samem", "learn", *HASHING, "--batch", "1")
    assert told.startswith("learnt from 2 episodes (0 known), 16 updates, 0 thoughts forgotten; snapshot q-")
    with Store(f"sqlite:///{tmp_path}/memory.db") as store:
        assert [barrier.matched for barrier in read_barriers(store, DEFAULT_NAME)] == [0, 8]
    again = out("samem", "learn")  # with the settings that the table was learnt with
    assert again.startswith("learnt from 0 episodes (2 known), 0 updates")
    stats = out("samem", "stats")
    assert any(line.split()[:4] == ["0", "2", "16", "50.0"] for line in stats.splitlines())
    assert "negative, highest 0.750" in stats  # 0.5, then half of the way to 1
    policy = out("samem", "policy")
    assert "+0.750" in policy
    assert "I do walk to bench 2" in policy


def test_show_names_the_steps_behind_a_value(out: Out) -> None:
    out("samem", "learn", *HASHING, "--batch", "1")
    policy = out("samem", "policy")
    [line] = [line for line in policy.splitlines() if "+0.750" in line]
    shown = out("samem", "show", line.split()[0])
    assert "I do walk to bench 2 recalled" in shown
    assert f"{played(1).id} step 7: reward +1.00, target +1.000, +0.500 -> +0.750" in shown
    assert out("samem", "learn", *HASHING, "--lifted", "--table", "roles").startswith(
        "learnt from 2 episodes (0 known)"
    )
    assert "grab Y off here" in out("samem", "show", "0", "--table", "roles", "--limit", "99")


def test_calibration_tells_states_from_one_another() -> None:
    found = calibrate([played(n, thing) for n, thing in enumerate(("cup", "nail", "cup", "gear"))], HashingEmbedder())
    assert 0.5 <= found.threshold < 1
    same, different = found.merged(found.threshold)
    assert same > different
    with pytest.raises(MemoryRecordError, match="too few trajectories"):
        calibrate([played(0)], HashingEmbedder())


def test_calibrate_prints_a_threshold(out: Out, tmp_path: Path) -> None:
    with Store(f"sqlite:///{tmp_path}/memory.db") as store:
        store.add_trajectories([played(2, "nail"), played(3, "gear")])
    told = out("memory", "calibrate", "embedder.kind=hashing")
    assert "threshold 0.850: joins" in told
    assert "proposed: threshold=" in told


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["samem", "stats", "--store", "none.db"], "none.db does not exist"),
        (["samem", "policy"], "samem table 'main' is not in the memory (there are: none); `saga samem learn` first"),
        (["samem", "learn", "alpha=2"], "samem.alpha: "),
        (["samem", "learn", "beta=2"], "samem.beta: "),
        (["samem", "learn", "judge=model", "embedder.kind=hashing"], "samem.judge: 'model' needs a language model"),
        (["samem", "learn", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_one_line(
    out: Out, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert message in error_of(monkeypatch, capsys, *args)


def test_a_table_keeps_its_settings(out: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    out("samem", "learn", *HASHING)
    assert saga(monkeypatch, "samem", "learn", "threshold=0.8") == 2
    assert read_settings(None, ["alpha=0.1"], {"threshold": 0.7}).threshold == 0.7


def test_episodes_without_thoughts_teach_actions_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "memory.db")
    with Store(f"sqlite:///{store}") as opened:
        opened.add_trajectories([workshop()])
    told = error_of(monkeypatch, capsys, "samem", "learn", *HASHING, "--store", store)
    assert "none of 1 episodes holds a written thought; learn from actions with --lifted" in told
    assert saga(monkeypatch, "samem", "learn", *HASHING, "--lifted", "--store", store) == 0
    assert "learnt from 1 episodes (0 known), 8 updates" in capsys.readouterr().out


LEARNT = {"embedder": {"kind": "hashing"}, "threshold": 0.99, "thought_threshold": 0.9}
"""The settings of HASHING that a table is bound to."""


def test_what_a_policy_recalls_from(out: Out, tmp_path: Path) -> None:
    out("samem", "learn", *HASHING)
    named = {"database": str(tmp_path / "memory.db"), **LEARNT}
    states = open_states(SamemConfig.model_validate({**named, "recall": "hint"}), None, tmp_path / "run")
    assert states is not None
    assert (states.snapshot.states, states.snapshot.episodes, states.settings.recall) == (4, 2, "hint")
    assert states.words.kinds == ("bench", "cup", "kiln", "nail", "shelf")
    assert states.provenance == {("workshop", "1")}
    with pytest.raises(MemoryRecordError, match=r"was learnt with threshold 0.99, not 0.5; set the same"):
        open_states(SamemConfig.model_validate({**named, "threshold": 0.5}), None, tmp_path / "run")
    with pytest.raises(MemoryRecordError, match=r"samem table 'other' is not in the memory \(there are: main\)"):
        open_states(SamemConfig.model_validate({**named, "table": "other"}), None, tmp_path / "run")
    own = open_states(SamemConfig.model_validate(LEARNT), None, tmp_path / "run")
    assert own is not None
    assert (own.snapshot.states, own.provenance) == (0, frozenset())
    assert open_states(None, None, tmp_path) is None


def test_an_evaluation_names_the_table_that_it_uses(tmp_path: Path) -> None:
    told = ["samem.recall=hint"]
    with pytest.raises(ConfigError, match=r"samem.database: none is named"):
        configure("smollm2-135m-instruct", "household/easy/eval-48", told, 1)
    (tmp_path / "config.yaml").write_text(
        "run: {name: x}\nenv: {name: household}\nsamem: {recall: hint}\neval: {tasks: household/easy/eval-48}\n"
    )
    config = configure(str(tmp_path), "household/easy/eval-48", [], 1)
    assert config.samem is not None
    assert config.samem.database == str(tmp_path / "memory.db")


def test_the_memory_tells_what_tables_it_holds(out: Out) -> None:
    told = out("samem", "learn", *HASHING)
    snapshot = told.split()[-1]
    assert f"samem table main: 4 states, 8 thoughts, snapshot {snapshot}" in out("memory", "stats")
    assert "1 qtable" in out("memory", "export", "memory.jsonl")
