"""Validation: what is tried on which tasks, and what follows from the scores."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from memory.records import EpisodeItem, Evidence, Link, PrincipleItem, ProcedureItem, TraceStep, Trajectory
from memory.settings import ValidationSettings
from memory.store import Ledger, LedgerEntry, Store
from memory.validation import (
    Arm,
    Contender,
    Result,
    Trial,
    contenders,
    judge_validation,
    ledger_retires,
    plan_validation,
    promise,
    record_validation,
    retire_by_ledger,
    run_validation,
)

pytestmark = pytest.mark.unit

TASKS = {f"{kind}{i}": kind for kind in "ab" for i in range(20)}
NAMES = [f"t{i}" for i in range(16)]


def principle(name: str, task_type: str = "") -> PrincipleItem:
    return PrincipleItem(world="w", grammar="g", task_type=task_type, condition=name, guidance="do")


def contender(name: str, *, task_type: str = "", **more: float) -> Contender:
    return Contender(name, principle(name, task_type), **more)  # type: ignore[arg-type]


def settings(**more: float) -> ValidationSettings:
    return ValidationSettings.model_validate({"resamples": 4000, **more})


def test_the_most_promising_comes_first_within_the_budget() -> None:
    # Control 32 episodes and 32 for each: a budget of 100 pays for two.
    tried = [contender("weak", promise=0.1), contender("strong", promise=0.4), contender("middle", promise=0.2)]
    plan = plan_validation(tried, TASKS, settings(episodes=100), 1)
    assert [trial.contender.id for trial in plan.trials] == ["strong", "middle"]
    assert plan.episodes == 96
    assert plan.skipped == (("weak", "would cost 32 episodes, 4 are left of 100"),)
    assert plan.trials[0].tasks == plan.trials[1].tasks == plan.control
    assert [sum(TASKS[task] == kind for task in plan.control) for kind in "ab"] == [8, 8]


def test_what_was_tried_waits_for_what_was_not() -> None:
    plan = plan_validation([contender("tried", promise=0.9, tried=1), contender("new")], TASKS, settings(), 1)
    assert [trial.contender.id for trial in plan.trials] == ["new", "tried"]


def test_revalidation_takes_every_fourth_place_and_only_when_due() -> None:
    hypotheses = [contender(f"h{i}", promise=-i) for i in range(5)]
    active = [contender(f"v{i}", active=True, round=i) for i in range(4)]
    plan = plan_validation([*active, *hypotheses], TASKS, settings(episodes=1000), 7)
    assert [trial.contender.id for trial in plan.trials] == ["h0", "h1", "h2", "v0", "h3", "h4", "v1", "v2"]


def test_tasks_of_the_principles_type_that_the_memory_does_not_rest_on() -> None:
    plan = plan_validation([contender("a", task_type="a")], TASKS, settings(), 1, provenance=["a0", "a1"])
    assert len(plan.control) == 16
    assert {TASKS[task] for task in plan.control} == {"a"}
    assert not {"a0", "a1"} & set(plan.control)
    few = plan_validation([contender("a", task_type="a")], TASKS, settings(), 1, provenance=[f"a{i}" for i in range(5)])
    assert few.trials == ()
    assert few.skipped == (("a", "15 held-out tasks of type a; 16 are needed"),)
    other = plan_validation([contender("a", task_type="a")], TASKS, settings(), 2)
    assert other.control != plan_validation([contender("a", task_type="a")], TASKS, settings(), 1).control


def test_no_budget_no_experiment() -> None:
    plan = plan_validation([contender("a")], TASKS, settings(episodes=0), 1)
    assert (plan.trials, plan.control, plan.episodes) == ((), (), 0)
    assert asyncio.run(run_validation(plan, Coin({}))) == []
    assert judge_validation([], settings()) == []


class Coin:
    """An experiment with known effects: each principle's condition names it."""

    def __init__(self, effects: dict[str, float], seed: int = 0) -> None:
        self._effects = effects
        self._generator = np.random.default_rng(seed)
        self._base = dict(zip(sorted({*NAMES, *TASKS}), self._generator.uniform(0.1, 0.7, 100), strict=False))
        self.played = 0

    async def run(self, principle: PrincipleItem | None, tasks: Sequence[str], samples: int) -> Arm:
        gain = self._effects[principle.condition] if principle else 0.0
        self.played += samples * len(tasks)
        scores = {task: self._generator.binomial(1, self._base[task] + gain, samples).tolist() for task in tasks}
        return Arm(scores, float(principle is not None))


def test_the_control_is_played_once_for_all() -> None:
    coin = Coin({"a": 0.0, "b": 0.0})
    plan = plan_validation([contender("a"), contender("b")], TASKS, settings(), 1)
    results = asyncio.run(run_validation(plan, coin))
    assert coin.played == plan.episodes == 96
    assert results[0].without == results[1].without


def result(name: str, gains: Sequence[float], **more: float) -> Result:
    without = {task: [0.4, 0.4] for task in NAMES}
    scores = {task: [0.4 + gain, 0.4 + gain] for task, gain in zip(NAMES, gains, strict=True)}
    return Result(Trial(contender(name, **more), tuple(NAMES)), without, scores)


def test_decisions() -> None:
    helps = [0.5, 0.4, 0.3, 0.5] * 4
    little = [0.5, -0.4, 0.3, -0.3] * 4
    harms = [-0.3, -0.4, -0.2, -0.3] * 4
    verdicts = judge_validation(
        [
            result("helps", helps),
            result("little", little),
            result("little again", little, tried=2),
            result("nothing", [0.1, -0.1] * 8),
            result("tells nothing", [0.0] * 16, tried=2),
            result("harms", harms),
            result("active", little, active=True),
            result("active and harms", harms, active=True),
        ],
        settings(),
    )
    assert {verdict.id: verdict.decision for verdict in verdicts} == {
        "helps": "validated",
        "little": "undecided",
        "little again": "rejected",
        "nothing": "rejected",
        "tells nothing": "untested",
        "harms": "rejected",
        "active": "kept",
        "active and harms": "retired",
    }
    [helps_verdict, little_verdict, *_] = verdicts
    assert helps_verdict.effect.difference == pytest.approx(0.425)
    assert helps_verdict.effect.low > 0
    assert little_verdict.effect.low < 0 < little_verdict.effect.high
    assert little_verdict.reason.startswith("difference +0.025 (")
    assert helps_verdict.record()["p_holm"] == helps_verdict.p_holm


def test_what_was_hardly_ever_shown_was_not_tried_and_corrects_nobody() -> None:
    shown = result("shown", [0.5, 0.4, 0.3, 0.5] * 4)
    hidden = [replace(result(f"h{i}", [0.1, -0.2] * 8), shown=0.49) for i in range(30)]
    verdicts = {verdict.id: verdict for verdict in judge_validation([shown, *hidden], settings())}
    assert verdicts["h0"].decision == "untested"
    assert verdicts["h0"].tried == 0
    assert verdicts["h0"].reason.endswith("it was shown in 49% of the episodes only, which tells nothing")
    assert verdicts["shown"].p_holm == verdicts["shown"].effect.p


def test_an_arm_that_fails_stops_the_others() -> None:
    class Broken(Coin):
        async def run(self, principle: PrincipleItem | None, tasks: Sequence[str], samples: int) -> Arm:
            if principle is None:
                raise RuntimeError("the model is gone")
            await asyncio.sleep(60)
            raise AssertionError("went on")

    plan = plan_validation([contender("a"), contender("b")], TASKS, settings(), 1)
    with pytest.raises(RuntimeError, match="the model is gone"):
        asyncio.run(run_validation(plan, Broken({})))


def test_holm_over_what_is_tried_at_once() -> None:
    """An effect that is significant alone is not among seven others without any."""
    close = [0.6, -0.1, 0.5, -0.2, 0.4, 0.5, -0.2, 0.4] * 2
    alone = judge_validation([result("close", close)], settings())
    assert alone[0].decision == "validated"
    zero = [0.3, -0.3] * 8
    among = judge_validation([result("close", close), *(result(f"zero{i}", zero) for i in range(7))], settings())
    assert among[0].decision == "undecided"
    assert among[0].p_holm == pytest.approx(min(1.0, 8 * alone[0].p_holm))


def simulate(effects: dict[str, float], seed: int) -> dict[str, tuple[str, float, float]]:
    plan = plan_validation([contender(name) for name in effects], TASKS, settings(episodes=1000), seed)
    verdicts = judge_validation(asyncio.run(run_validation(plan, Coin(effects, seed))), settings(resamples=2000))
    return {verdict.id: (verdict.decision, verdict.effect.low, verdict.effect.high) for verdict in verdicts}


def test_a_hundred_experiments_with_a_known_effect() -> None:
    found = [simulate({"helps": 0.25}, seed)["helps"] for seed in range(100)]
    covered = sum(low <= 0.25 <= high for _, low, high in found)
    validated = sum(decision == "validated" for decision, _, _ in found)
    assert covered >= 90
    assert validated >= 30  # 16 tasks x 2 samples find half of the effects of a quarter
    assert sum(decision == "rejected" for decision, _, _ in found) <= 5


def test_a_hundred_experiments_without_an_effect() -> None:
    nothing = {f"n{i}": 0.0 for i in range(6)}
    families = [simulate(nothing, seed) for seed in range(100)]
    false = sum(any(decision == "validated" for decision, _, _ in family.values()) for family in families)
    assert false <= 5  # the level is 5 %, and half of it lies on the side of help
    covered = sum(low <= 0 <= high for family in families for _, low, high in family.values())
    assert covered >= 0.9 * 600


def test_the_arms_must_have_the_same_tasks() -> None:
    broken = Result(Trial(contender("a"), ("x", "y")), {"x": [0.0], "y": [1.0]}, {"x": [0.0]})
    with pytest.raises(ValueError, match="items that are not the same"):
        judge_validation([broken], settings())


def test_promise_by_hand() -> None:
    ledger = Ledger(episodes_with=10, outcome_with=0.7, episodes_without=30, outcome_without=0.5)
    assert promise(ledger, None) == pytest.approx(0.2 * 10 / 20)
    assert promise(ledger, 0.3) == pytest.approx(0.4)
    assert promise(Ledger(), None) == 0.0


def test_the_ledger_retires_what_clearly_harms() -> None:
    def ledger(with_: float, without: float, n: int) -> Ledger:
        return Ledger(episodes_with=n, outcome_with=with_, episodes_without=n, outcome_without=without)

    assert ledger_retires(ledger(0.2, 0.7, 30), settings())
    assert not ledger_retires(ledger(0.6, 0.7, 30), settings())
    assert not ledger_retires(ledger(0.0, 1.0, 10), settings())  # too few episodes


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"sqlite:///{tmp_path}/memory.db")


def write_principle(store: Store, name: str) -> str:
    trajectory = Trajectory(
        source=name,
        world="w",
        grammar="g",
        task=name,
        success=True,
        steps=(TraceStep(index=0, observation="a room", action="look"),),
    )
    episode = EpisodeItem(world="w", grammar="g", trajectory=trajectory.id, goal=name, outcome="success")
    procedure = ProcedureItem(world="w", grammar="g", when=name, steps=("look",))
    item = principle(name)
    evidence = (Evidence(trajectory=trajectory.id, step=0, quote="a room"),)
    store.add_trajectories([trajectory])
    links = [
        Link(lower=trajectory.id, upper=episode.id, evidence=evidence),
        Link(lower=episode.id, upper=procedure.id, evidence=evidence),
        Link(lower=procedure.id, upper=item.id, evidence=evidence),
    ]
    report = store.write([episode, procedure, item], links)
    assert not report.rejected
    return item.id


def test_from_the_store_and_back(store: Store) -> None:
    helps, little, harms = (write_principle(store, name) for name in ("helps", "little", "harms"))
    store.judge(helps, "audit", {"checks": [{"name": "direction", "estimate": 0.3}]})
    tried = {contender.id: contender for contender in contenders(store, "w", "g")}
    assert (tried[helps].promise, tried[little].promise) == (0.3, 0.0)
    assert contenders(store, "w", "other grammar") == []

    gains = {helps: [0.5, 0.4] * 8, little: [0.5, -0.4] * 8, harms: [-0.3, -0.2] * 8}
    results = [
        Result(Trial(tried[id], tuple(NAMES)), result("", gains[id]).without, result("", gains[id]).with_principle)
        for id in (helps, little, harms)
    ]
    record_validation(store, judge_validation(results, settings()), 3)
    assert [store.item(id).status for id in (helps, little, harms)] == ["validated", "candidate", "rejected"]
    assert store.item(harms).reason.startswith("validation: difference -0.250")
    record_validation(store, judge_validation(results, settings()), 3)
    assert len(store.judgements(helps, "validation")) == 1
    again = {contender.id: contender for contender in contenders(store, "w", "g")}
    assert set(again) == {helps, little}
    assert (again[helps].active, again[helps].round, again[little].tried) == (True, 3, 1)

    store.credit(
        [LedgerEntry(helps, f"run:r/{i}", outcome=float(i % 2 == 0 and i > 60), instantiated=i % 2) for i in range(100)]
    )
    store.credit([LedgerEntry(helps, f"run:s/{i}", outcome=1.0) for i in range(40)])
    # Where it was suppressed it did not apply: no comparison.
    store.credit([LedgerEntry(helps, f"run:t/{i}", outcome=1.0, suppressed=1, retrieved=1) for i in range(40)])
    assert store.item(helps).ledger.episodes_without == 90
    assert store.item(helps).ledger.episodes_with == 50
    [(retired, reason)] = retire_by_ledger(store, "w", "g", settings(), 4)
    assert retired == helps
    assert reason.startswith("ledger: outcome 0.000 in 50 episodes with it, 0.6")
    assert store.item(helps).status == "retired"
