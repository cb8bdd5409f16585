"""Filling and building a memory by command: what goes in, what is said, and what a mistake says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from memory.builder_settings import BuilderSettings
from memory.distil import build_offline, distil
from memory.embedding import HashingEmbedder
from memory.records import MemoryRecordError, TraceStep, Trajectory
from memory.store import Store
from tests.scripted_server import Reply, ScriptedServer
from train.cli import app
from train.memory_build import build_config

pytestmark = pytest.mark.unit

TEXT = "A room. You see a box 1.\nYour task is to: open the box.\n> open box 1\n"
GOOD = {"name": "open-Box-1/t", "result": 1, "traj": TEXT + "You open the box 1."}


def saga(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["memory", *arguments], catch_exceptions=True)
    return result.exit_code, result.output + (str(result.exception) if result.exception else "")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    rows = [GOOD, GOOD | {"result": 0, "traj": TEXT.rstrip()}, GOOD | {"traj": TEXT + "Opened.\n> \nNothing happens."}]
    lines = [*map(json.dumps, rows), "{"]
    (tmp_path / "old.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_ingest_says_what_went_in_and_repeats_nothing(files: Path) -> None:
    options = ["--world", "rooms", "--grammar", "g", "--store", str(files / "memory.db"), "--refusal", "Nothing"]
    code, said = saga("ingest", str(files / "old.jsonl"), *options)
    assert code == 0
    assert "3 episodes (2 complete, 1 odd), 3 of them new; 4 steps" in said
    assert "odd: old.jsonl#3: step 1: an empty action" in said
    assert "not read: old.jsonl#4: not JSON" in said
    assert "0 of them new" in saga("ingest", str(files / "old.jsonl"), *options)[1]
    with Store(f"sqlite:///{files}/memory.db") as store:
        assert [(t.world, t.task_type, t.success) for t in store.trajectories()] == [
            ("rooms", "open", True),
            ("rooms", "open", False),
            ("rooms", "open", True),
        ]
        assert [step.valid for t in store.trajectories() for step in t.steps] == [True, None, True, False]


def test_ingest_names_what_is_missing(files: Path) -> None:
    store = ["--store", str(files / "memory.db")]
    assert "outside rollouts need a world" in saga("ingest", str(files / "old.jsonl"), *store)[1]
    assert "does not exist" in saga("ingest", str(files / "none.jsonl"), *store)[1]


def test_build_by_a_model_and_without(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    saga("ingest", "old.jsonl", "--world", "rooms", "--grammar", "g")
    code, said = saga("build", "embedder.kind=hashing")
    assert code == 0
    assert "new records: episode 3" in said

    def answer(body: dict[str, Any]) -> Reply:
        if body["response_format"]["json_schema"]["name"] != "EpisodeAnswer":
            return Reply('{"operations": []}')
        claim = {"step": 0, "what": "opened it", "quote": "open box 1"}
        return Reply(json.dumps({"goal": "g", "key_steps": [claim], "obstacles": []}))

    with ScriptedServer(answer) as server:
        arguments = ["build", "--builder", "model", f"model.url={server.url}", "model.model=m", "model.price_in=10",
                     "embedder.kind=hashing"]  # fmt: skip
        code, said = saga(*arguments)
        assert code == 0
        assert "new records: episode 3" in said
        assert "calls: 5 paid, 0 from the cache; 500 + 50 tokens, cost 0.0050" in said
        assert "stage        answers  complete  valid  grounded  items\nepisode            3         3      3" in said
        assert "calls: 0 paid" in saga(*arguments, "--round", "1")[1]
    assert len(list((files / "memory.build" / "calls").glob("*.json"))) == 5


def test_a_server_that_refuses_is_an_error_after_the_report(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    saga("ingest", "old.jsonl", "--world", "rooms", "--grammar", "g")
    with ScriptedServer(lambda _: Reply("bad key sk-secret", status=401)) as server:
        code, said = saga(
            "build", "--builder", "model", f"model.url={server.url}", "model.model=m", "embedder.kind=hashing"
        )
    assert code == 1
    assert "trajectories waiting: 3" in said
    assert "HTTP 401: bad key ***; is OPENAI_API_KEY set?" in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["builder=model"], "needs model.url and model.model"),
        (["model.url=x"], "model.model: Field required"),
        (["repairs=-1"], r"repairs: .*greater than or equal to 0 \(-1\)"),
        (["repair=1"], r"repair: Extra inputs are not permitted \(1\)"),
        (
            ["model.url=http://x", "model.model=m", "model.max_tokens=4096"],
            r"model: max_tokens 4096 is less than the 15421 tokens .* set max_tokens to 15421 or more, or lower",
        ),
        (["model.url=http://x", "model.model=m", "model.key=sk-12345"], r"model.key: String should match pattern"),
    ],
)
def test_wrong_settings_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(MemoryRecordError, match=message):
        build_config(None, overrides, "")


def test_settings_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text("model: {url: http://x, model: m}\nconsolidation: {limits: {principles: 7}}\n")
    made = build_config(tmp_path / "b.yaml", ["model.max_calls=3"], "model")
    assert made.model is not None
    assert (made.builder, made.model.max_calls, made.consolidation.limits.principles) == ("model", 3, 7)


def trajectory(number: int, order: tuple[str, ...], success: bool) -> Trajectory:
    steps, seen = [], "A room."
    for index, action in enumerate(order):
        steps.append(
            TraceStep(index=index, observation=seen, action=f"{action} box {number % 3}", result=f"You {action}.")
        )
        seen = f"You {action}."
    return Trajectory(
        source=f"s#{number}",
        world="w",
        grammar="g",
        task=str(number),
        task_type="t",
        goal="g",
        success=success,
        steps=tuple(steps),
    )


def test_what_an_offline_build_no_longer_finds_is_retired_until_it_is_found_again(tmp_path: Path) -> None:
    with Store(f"sqlite:///{tmp_path}/memory.db") as store:
        store.add_trajectories([trajectory(n, ("open", "fill"), True) for n in range(6)])
        first = build_offline(store)
        assert first.written["procedure"] >= 1
        assert build_offline(store, round=1).written.total() == 0
        (old, *_) = [stored for stored in store.items(2) if stored.item.task_type == "t"]
        # Many successes of another kind push the old procedure below the share that one must explain.
        store.add_trajectories([trajectory(n, ("turn", "push", "shut"), True) for n in range(10, 70)])
        second = build_offline(store, round=2)
        assert store.item(old.id).status == "retired"
        assert store.item(old.id).reason == "no longer found in the trajectories (round 2)"
        assert second.retired["procedure"] >= 1
        store.add_trajectories([trajectory(n, ("open", "fill"), True) for n in range(70, 130)])
        build_offline(store, round=3)
        assert (store.item(old.id).status, store.item(old.id).reason) == ("candidate", "found again")


def test_a_distilled_memory_keeps_its_size(tmp_path: Path) -> None:
    settings = BuilderSettings.model_validate({"consolidation": {"similarity": 1.0, "limits": {"episodes": 2}}})
    with Store(f"sqlite:///{tmp_path}/memory.db") as store:
        store.add_trajectories([trajectory(n, ("open", "fill")[: n % 2 + 1], n % 2 == 1) for n in range(6)])
        report = distil(store, settings, HashingEmbedder(), tmp_path)
        in_use = [stored for stored in store.items(1) if stored.status != "retired"]
        assert len(in_use) <= 2
        assert len(report.consolidated.merges) + len(report.consolidated.removals) >= 4
        # What left does not come back with the next build.
        distil(store, settings, HashingEmbedder(), tmp_path, round=1)
        assert [s.id for s in store.items(1) if s.status != "retired"] == [s.id for s in in_use]
