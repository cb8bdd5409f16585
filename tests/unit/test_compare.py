"""Two evaluations side by side: paired differences, and the warnings when they may not be compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from train.cli import main
from train.compare import compare, find_evaluation, read_evaluation
from train.config import ConfigError

pytestmark = pytest.mark.unit


def item(name: str, won: bool, *, kind: str = "put", seed: int = 0, score: float | None = None, **more: Any) -> dict:
    base = {"id": name, "type": kind, "seed": seed, "status": "ok", "won": won, "score": float(won)}
    return base | ({} if score is None else {"score": score}) | more


def evaluation(*items: dict[str, Any], **fields: Any) -> dict[str, Any]:
    base = {"task_set": "w/set", "manifest_hash": "m", "env": {"name": "w"}, "seeds": [0], "temperature": 0.4}
    return base | {"prompting": {}, "dtype": "float32", "items": list(items)} | fields


A = evaluation(*(item(f"g{i}", i < 4, kind="put" if i % 2 else "get") for i in range(8)))
B = evaluation(*(item(f"g{i}", i != 0, kind="put" if i % 2 else "get") for i in range(8)))


def test_differences_by_hand() -> None:
    found = compare(A, B)
    rows = {(row.task_type, row.metric): row for row in found.rows}
    assert set(rows) == {("", "success"), ("get", "success"), ("put", "success")}
    # A wins g0 to g3, B all but g0: 4 of 8 and 7 of 8; of the odd ones 2 of 4 and 4 of 4.
    whole, put, get = rows["", "success"], rows["put", "success"], rows["get", "success"]
    assert (whole.items, whole.a, whole.b) == (8, 0.5, 0.875)
    assert (put.a, put.b, get.a, get.b) == (0.5, 1.0, 0.5, 0.75)
    assert whole.effect is not None
    assert whole.effect.difference == pytest.approx(0.375)
    assert whole.effect.low < 0.375 < whole.effect.high
    assert [name for name, *_ in found.better] == ["g4", "g5", "g6", "g7"]
    assert found.worse == [("g0", "get", 1.0, 0.0)]
    assert found.equal == 3
    assert found.warnings == []


def test_seeds_of_an_item_are_averaged_and_scores_told_where_they_say_more() -> None:
    a = evaluation(item("x", False, score=0.4), item("x", False, seed=1, score=-1.0), item("y", True))
    b = evaluation(item("x", True), item("x", False, seed=1, score=0.6), item("y", True))
    rows = {(row.task_type, row.metric): row for row in compare(a, b).rows}
    # x: (0.4 + 0) / 2 and (1 + 0.6) / 2; y: 1 and 1.
    assert (rows["", "score"].a, rows["", "score"].b) == (pytest.approx(0.6), pytest.approx(0.9))
    assert (rows["", "success"].a, rows["", "success"].b) == (0.5, 0.75)
    single = compare(evaluation(item("x", True)), evaluation(item("x", False)))
    assert [row.effect for row in single.rows] == [None, None]


def test_what_does_not_match_is_warned_of() -> None:
    a = evaluation(item("x", True), item("y", True), item("z", False))
    b = evaluation(
        item("x", True),
        item("y", True, status="env_error"),
        item("v", False),
        seeds=[0, 1],
        manifest_hash="n",
        dtype="bfloat16",
    )
    b["items"].append(item("x", False, seed=1))
    found = compare(a, b)
    assert found.warnings == [
        "1 items are in A only and were left out (for example z)",
        "1 items are in B only and were left out (for example v)",
        "1 items were played with other seeds (for example x)",
        'the manifests differ: "m" and "n"',
        "the seeds differ: [0] and [0, 1]",
        'the number formats of the weights differ: "float32" and "bfloat16"',
        "1 of 4 episodes of B ended by a fault and count as lost (the first: y, env_error)",
        "1 items ended by a fault more often in one of them, which counts against it: evaluate that one anew (for "
        "example y)",
        "75.0 % of the episodes of B scored 0 (more than 70.0 %): on such a floor little can be told apart; compare on "
        "easier items or with a stronger policy",
    ]
    assert compare(a, b, meant={"seeds", "manifest_hash"}).warnings == [
        warning for warning in found.warnings if not warning.startswith(("the seeds", "the manifests"))
    ]
    assert found.rows[0].b == 0.25  # x won once of two, y by a fault not at all
    with pytest.raises(ConfigError, match="no item in common"):
        compare(evaluation(item("x", True)), evaluation(item("y", True)))


def test_equal_numbers_of_other_seeds_are_no_match() -> None:
    a, b = (evaluation(item("x", True, seed=seed), item("y", False, seed=0)) for seed in (0, 1))
    assert compare(a, b, ("none", "full")).warnings == ["1 items were played with other seeds (for example x)"]


def test_an_evaluation_is_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no evals/\*.json there"):
        find_evaluation(tmp_path)
    (tmp_path / "evals").mkdir()
    first = tmp_path / "evals/eval-warm.json"
    first.write_text(json.dumps(A))
    assert find_evaluation(tmp_path) == find_evaluation(first) == first
    assert read_evaluation(first) == A
    (tmp_path / "evals/eval-start.json").write_text("{}")
    with pytest.raises(ConfigError, match="several evaluations; name one of"):
        find_evaluation(tmp_path)
    (tmp_path / "evals/eval-final.json").write_text("{}")
    assert find_evaluation(tmp_path).name == "eval-final.json"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"items": []}', '{"items": [1]}', '{"items": [{"id": "x"}]}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match="no evaluation; give a file"):
        read_evaluation(tmp_path / "x.json")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for name, told in (("a", A), ("b", B | {"seeds": [7]})):
        (tmp_path / f"{name}.json").write_text(json.dumps(told))
    monkeypatch.setattr(sys, "argv", ["saga", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--items"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    out = capsys.readouterr().out
    for part in (
        "B won more on 4 items, less on 1, as much on 3",
        "less: g0 (get): 100.0 % -> 0.0 %",
        "warning: the seeds differ: [0] and [7]",
        "+37.5 (",
    ):
        assert part in out
