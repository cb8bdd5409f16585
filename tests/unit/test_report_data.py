"""What a report computes from what runs left, against values worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.usage import Check, Instantiation, MemoryUse, Recall, Regulation
from tests.unit.test_compare import evaluation, item
from train.report_data import (
    Cost,
    Played,
    chart,
    contributions,
    costs,
    curves,
    evaluation_name,
    joined,
    moving_mean,
    phase_seconds,
    played,
    type_curves,
)
from train.trajectory import Context, Episode, Span, Step

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("config", "phase", "name"),
    [
        ({}, "eval-start", "at the start"),
        ({}, "eval", "evaluation"),
        ({"grpo": None}, "eval-final", "at the end"),
        ({"grpo": {"iterations": 2}}, "eval-final", "after RL"),
        ({"rounds": 3, "grpo": {}}, "eval-final", "after round 3"),
        ({"rounds": 3}, "eval-round-0010", "after round 10"),
        ({"rounds": 3}, "eval-round-0002-without", "after round 2, without memory"),
        ({}, "something-else", "something-else"),
    ],
)
def test_names_of_evaluations(config: dict[str, Any], phase: str, name: str) -> None:
    assert evaluation_name(config, phase) == name


def test_curves_join_numbered_phases_and_leave_out_what_is_no_number() -> None:
    lines = [
        {"phase": "grpo-0002", "step": 2, "time": 9.0, "success": 0.5, "adapter": "policy-v0002"},
        {"phase": "grpo-0001", "step": 1, "time": 8.0, "success": 0.25, "loss": None, "loud": True},
        {"phase": "round", "step": 1, "time": 10.0, "success": 0.375},
    ]
    assert curves(lines) == {("grpo", "success"): [(1, 0.25), (2, 0.5)], ("round", "success"): [(1, 0.375)]}
    assert [chart(name) for name in ("grpo-0001", "eval-round-0003", "warm-start")] == [
        "grpo",
        "eval-round",
        "warm-start",
    ]


def test_a_moving_mean_covers_fewer_at_the_start() -> None:
    points = [(1, 1.0), (2, 3.0), (4, 8.0), (5, 1.0)]
    assert moving_mean(points, 3) == [(1, 1.0), (2, 2.0), (4, 4.0), (5, 4.0)]


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30), st.integers(1, 8))
def test_a_moving_mean_keeps_places_and_stays_within_the_values(values: list[float], width: int) -> None:
    smooth = moving_mean(list(enumerate(values)), width)
    assert [place for place, _ in smooth] == list(range(len(values)))
    assert all(min(values) - 1e-9 <= value <= max(values) + 1e-9 for _, value in smooth)


def won(count: int) -> dict[str, Any]:
    """An evaluation of ten items, the first ``count`` of which were won."""
    return evaluation(*(item(f"g{number}", number < count) for number in range(10)))


def test_what_weights_and_memory_contributed() -> None:
    evaluations = {
        "eval-start": won(1),
        "eval-round-0001-without": won(3),
        "eval-round-0001": won(6),
        "eval-final-without": won(5),
        "eval-final": won(9),
    }
    found = contributions({"rounds": 2}, evaluations)
    told = [(one.part, one.what, one.comparison.rows[0].effect) for one in found if one.comparison]
    assert [(part, what, effect and round(effect.difference, 9)) for part, what, effect in told] == [
        ("weights", "after round 1, without memory – at the start", 0.2),
        ("weights", "after round 2, without memory – after round 1, without memory", 0.2),
        ("memory", "after round 1 – after round 1, without memory", 0.3),
        ("memory", "after round 2 – after round 2, without memory", 0.4),
        ("everything", "after round 2 – at the start", 0.8),
    ]
    assert [one.when for one in found] == [
        "after round 1",
        "after round 2",
        "after round 1",
        "after round 2",
        "after round 2",
    ]


def test_a_run_without_memory_contributes_by_its_stages_alone() -> None:
    found = contributions({"grpo": {}}, {"eval-warm": won(4), "eval-final": won(7)})
    assert [(one.part, one.what) for one in found] == [("weights", "after RL – after warm start")]
    assert contributions({}, {"eval-final": won(4)}) == []
    other = evaluation(*(item(f"other{number}", True) for number in range(3)))
    [alone] = contributions({}, {"eval-warm": won(4), "eval-final": other})
    assert alone.comparison is None


def episode(number: int, kind: str, is_won: bool, **fields: Any) -> Episode:
    base = {"id": f"p/{number}", "phase": "p", "env": "w", "task": f"t{number}", "task_type": kind, "seed": 0}
    return Episode(**base, won=is_won, tokens_in=100, tokens_out=10, **fields)


def test_the_numbers_of_a_phase() -> None:
    spans = [
        Span(start=0, end=1, step=0, logprobs=[-0.5]),
        Span(start=1, end=2, step=1, logprobs=[-0.5]),
        Span(start=2, end=3, step=2),
    ]
    objected = Regulation(
        proposals=("a", "b"),
        checks=(Check(item="r-1", attempt=0, outcome="violated"), Check(item="r-1", attempt=1, outcome="followed")),
        choice="resampled",
    )
    stubborn = Regulation(
        proposals=("a", "a"), checks=(Check(item="r-1", attempt=0, outcome="violated"),), choice="fallback"
    )
    quiet = Regulation(proposals=("a",), checks=(Check(item="r-1", attempt=0, outcome="idle"),))
    use = MemoryUse(
        mode="full",
        snapshot="s",
        instantiations=(Instantiation(item="r-1", text="do"), Instantiation(item="r-2", reason="no")),
    )
    recalls = [
        Recall(snapshot="q", thought="go", followed=True),
        Recall(snapshot="q", thought="go", followed=False),
        Recall(snapshot="q"),
    ]
    steps = [
        Step(index=number, observation="o", text="t", regulation=regulation, recall=recall)
        for number, (regulation, recall) in enumerate(zip((objected, stubborn, quiet), recalls, strict=True))
    ]
    first = episode(0, "put", True, contexts=[Context(ids=[1, 2, 3], spans=spans)], memory=use, steps=steps)
    fault = episode(1, "put", True, status="env_error")
    found = played("p", [first, fault, episode(2, "get", False)])
    assert found == Played(
        "p", episodes=3, calls=2, tokens_in=300, tokens_out=30, by_type={"get": (0, 1), "put": (1, 2)}, guided=1,
        shown=1, checked=3, objected=2, resampled=1, fallback=1, recalled=2, followed=1,
    )  # fmt: skip
    twice = joined([found, found], "both")
    assert (twice.phase, twice.calls, twice.by_type) == ("both", 4, {"get": (0, 2), "put": (2, 4)})


def test_task_types_over_iterations() -> None:
    phases = [
        Played("grpo-0001", by_type={"put": (1, 4)}),
        Played("grpo-0002", by_type={"get": (2, 2), "put": (3, 4)}),
        Played("grpo-0003", by_type={"get": (0, 2)}),
        Played("grpo-0004", by_type={"get": (1, 2)}),
    ]
    assert type_curves(phases, 2) == {
        "get": [(2, 1.0), (3, 0.5), (4, 0.25)],
        "put": [(1, 0.25), (2, 0.5), (3, 0.75)],  # none was played in the last two
    }


METRICS = [
    {"phase": "warm-start", "step": 1, "time": 100.0},
    {"phase": "warm-start", "step": 2, "time": 104.0},
    {"phase": "eval-warm", "step": 1, "time": 164.0},
    {"phase": "grpo-0001", "step": 1, "time": 300.0, "iteration_seconds": 130.0},
    {"phase": "grpo-0002", "step": 2, "time": 9000.0, "iteration_seconds": 120.0},  # resumed after a pause
    {"phase": "distil-0001", "step": 1, "time": 9010.0},
]


def test_seconds_are_stated_or_lie_between_records() -> None:
    assert phase_seconds(METRICS) == {"warm-start": 4.0, "eval-warm": 60.0, "grpo": 250.0, "distil": 10.0}
    assert phase_seconds([]) == {}


def test_what_a_run_cost() -> None:
    phases = [
        Played("eval-warm", episodes=3, calls=30, tokens_in=3000, tokens_out=90),
        Played("grpo-0001", episodes=8, calls=80, tokens_in=8000, tokens_out=240),
        Played("grpo-0002", episodes=8, calls=70, tokens_in=7000, tokens_out=210),
    ]
    journal = {
        "warm-start": {},
        "distil-0001": {"spend": {"calls": 5, "tokens_in": 900, "tokens_out": 100, "cost": 0.25}},
    }
    assert costs(METRICS, phases, journal) == [
        Cost("warm-start", 1, 0, 0, 0, 0, 4.0),
        Cost("eval-warm", 1, 3, 30, 3000, 90, 60.0),
        Cost("grpo", 2, 16, 150, 15000, 450, 250.0),
        Cost("distil", 1, 0, 5, 900, 100, 10.0, 0.25),
        Cost("all", 5, 19, 185, 18900, 640, 324.0, 0.25),
    ]
    # An evaluation's folder has no metrics: no time is known.
    assert costs([], phases[:1], {})[-1] == Cost("all", 1, 3, 30, 3000, 90, None)
