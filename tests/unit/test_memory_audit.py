"""The audit: planted bad predicates are caught by the check that is meant for them, planted good ones pass."""

from collections.abc import Iterator

import numpy as np
import pytest

from memory.audit import audit
from memory.audit_checks import FOLLOWED, IDLE, OFF, VIOLATED, Audit, Check, LabelledSteps, judge, label_steps
from memory.predicates import PredicateHost
from memory.records import TraceStep, Trajectory
from memory.settings import AuditSettings
from memory.statistics import cluster_weights, wilson_interval
from tests.unit.audit_world import episode, parse, principle

pytestmark = pytest.mark.unit

TRAJECTORIES = [episode(seed) for seed in range(200)]
OPENED = "history.exists(h, h.verb == 'open {0}' && h.args[0] == action.args[1])"
HANDS_FULL = "history.exists(h, h.action == 'take key' && h.valid)"

PLANTED = {
    "order": principle("action.verb == 'put {0} in {1}'", OPENED),
    "prohibition": principle(f"action.verb == 'put {{0}} in {{1}}' && !{OPENED}", "false"),
    "refusal": principle("action.verb == 'take {0}'", f"!{HANDS_FULL}"),
    "inverted": principle("action.verb == 'put {0} in {1}'", f"!{OPENED}"),
    "always": principle("true", "false"),
    "never": principle("action.verb == 'sing {0}'", "false"),
    "good moves": principle(
        "action.verb == 'open {0}' || action.verb == 'put {0} in {1}'", OPENED.replace("[1]", "[0]")
    ),
    "step": principle("true", "step <= 30"),
    "step, as a trigger": principle("step > 30", "false"),
    "history": principle("true", "size(history) <= 30"),
    "history, as a trigger": principle("size(history) > 30", "false"),
    "step and action": principle("action.verb == 'search {0}'", "step <= 30"),
    "raises": principle("history[30].valid", "true"),
    "refused": principle("action.__class__ == 'x'", "true"),
}


@pytest.fixture(scope="module")
def host() -> Iterator[PredicateHost]:
    with PredicateHost() as found:
        yield found


@pytest.fixture(scope="module")
def audits(host: PredicateHost) -> dict[str, Audit]:
    return audit(PLANTED, TRAJECTORIES, parse, host)


def check(audits: dict[str, Audit], name: str, which: str) -> Check:
    [found] = [check for check in audits[name].checks if check.name == which]
    return found


@pytest.mark.parametrize("name", ["order", "prohibition", "refusal"])
def test_planted_good_predicates_pass(audits: dict[str, Audit], name: str) -> None:
    assert audits[name].decision == "passed", audits[name].reason
    assert audits[name].reason == ""
    assert check(audits, name, "risk_set").low > 0.1  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("inverted", "direction"),
        ("inverted", "risk_set"),
        ("inverted", "false_positives"),
        ("always", "trigger_rate"),
        ("always", "way_out"),
        ("always", "false_positives"),
        ("never", "trigger_rate"),
        ("good moves", "false_positives"),
        ("step", "risk_set"),
        ("step", "way_out"),
        ("step, as a trigger", "way_out"),
        ("history", "risk_set"),
        ("history", "way_out"),
        ("history, as a trigger", "way_out"),
        ("step and action", "risk_set"),
        ("raises", "errors"),
    ],
)
def test_planted_bad_predicates_fail_the_check_that_is_meant_for_them(
    audits: dict[str, Audit], name: str, which: str
) -> None:
    assert audits[name].decision == "failed"
    assert check(audits, name, which).state == "failed", audits[name].reason


def test_what_tracks_failure_would_pass_without_risk_sets(audits: dict[str, Audit]) -> None:
    """The bait is real: firing late does go with failure, and stops few good moves."""
    for name in ("step", "history", "step and action"):
        assert check(audits, name, "direction").state == "passed"
        assert check(audits, name, "false_positives").state == "passed"
        assert check(audits, name, "trigger_rate").state == "passed"


def test_the_static_check_comes_first(audits: dict[str, Audit]) -> None:
    assert audits["refused"].failed == ("static",)
    assert "no field '__class__'" in audits["refused"].reason
    assert list(audits) == list(PLANTED)


def test_no_mistake_is_found_where_there_is_none() -> None:
    """Searching box 7 costs nothing, though those who search long, and fail, do it more often. 50 data sets."""
    codes = {
        "search box7": VIOLATED,
        "take key": IDLE,
        "open chest": IDLE,
        "look chest": IDLE,
        "put key in chest": IDLE,
    }
    states = []
    for run in range(50):
        trajectories = [episode(seed, mistake=0.0, refused=0.0) for seed in range(1000 * run, 1000 * run + 150)]
        outcomes = [codes.get(str(step.action), FOLLOWED) for played in trajectories for step in played.steps]
        weights = cluster_weights(150, 300, run)
        found = judge(label_steps(trajectories), np.array(outcomes, dtype=np.int8), (0, 10), weights, AuditSettings())
        states.append({check.name: check.state for check in found.checks})
    assert sum(state["direction"] == "passed" for state in states) > 25  # the bait
    assert sum(state["risk_set"] == "passed" for state in states) <= 4  # 1.25 expected


def test_little_data_leaves_it_open(host: PredicateHost) -> None:
    found = audit({"order": PLANTED["order"]}, TRAJECTORIES[:4], parse, host)["order"]
    assert found.decision == "open"
    assert "5 each are needed" in found.reason
    assert audit({"order": PLANTED["order"]}, [], parse, host)["order"].decision == "open"


def test_a_task_type_limits_where_a_principle_is_audited(host: PredicateHost) -> None:
    others = [episode(seed, kind="b", mistake=0.0) for seed in range(500, 540)]
    rules = {"any": PLANTED["order"], "a": PLANTED["order"].model_copy(update={"task_type": "a"})}
    found = audit(rules, [*TRAJECTORIES[:60], *others], parse, host)
    assert (found["any"].episodes, found["a"].episodes) == (100, 60)


def test_labels() -> None:
    def trajectory(success: bool | None) -> Trajectory:
        steps = (
            TraceStep(index=0, observation="", action="a", valid=True),
            TraceStep(index=1, observation="", action=None, valid=None),
            TraceStep(index=2, observation="", action="b", valid=False),
            TraceStep(index=3, observation="", action="c", valid=None),
        )
        return Trajectory(source=str(success), world="w", grammar="g", task="t", success=success, steps=steps)

    won, lost = trajectory(True), trajectory(False)
    labels = label_steps([won, lost])
    assert labels.episode.tolist() == [0, 0, 0, 1, 1, 1]
    assert labels.position.tolist() == [0, 2, 3, 0, 2, 3]
    assert labels.good.tolist() == [True, False, True, False, False, False]
    assert label_steps([won], {won.id: {3}}).good.tolist() == [False, False, True]


def steps(*episodes: str) -> tuple[LabelledSteps, np.ndarray]:
    """Each word is an episode, each letter a step: v(iolated), f(ollowed), i(dle), x (off); capitals are good moves."""
    letters = "".join(episodes)
    codes = {"v": VIOLATED, "f": FOLLOWED, "i": IDLE, "x": OFF}
    labels = LabelledSteps(
        np.repeat(np.arange(len(episodes)), [len(word) for word in episodes]),
        np.concatenate([np.arange(len(word)) for word in episodes]),
        np.array([letter.isupper() for letter in letters]),
        np.zeros(len(episodes), dtype=np.int64),
    )
    return labels, np.array([codes[letter.lower()] for letter in letters], dtype=np.int8)


def judged(*episodes: str, **settings: float) -> dict[str, Check]:
    labels, outcomes = steps(*episodes)
    weights = cluster_weights(len(episodes), 500)
    found = judge(labels, outcomes, (1, 10), weights, AuditSettings.model_validate({"min_episodes": 1, **settings}))
    return {check.name: check for check in found.checks}


def test_direction_and_rates_by_hand() -> None:
    # Violating: episode 0: 0 of 2 good, episode 1: 1 of 1. Following: episode 1: 1 of 1, 2: 1 of 1, 3: 0 of 1.
    found = judged("viv", "FV", "IF", "fi")
    assert found["direction"].estimate == pytest.approx(2 / 3 - 1 / 2)
    assert (found["direction"].k, found["direction"].n) == (2, 5)
    assert found["direction"].note == "2 episodes violate it, 3 follow it"
    # Good moves: F V, I F; one is stopped.
    assert (found["false_positives"].k, found["false_positives"].n) == (1, 4)
    assert (found["false_positives"].low, found["false_positives"].high) == wilson_interval(1, 4)
    assert (found["trigger_rate"].k, found["trigger_rate"].n) == (3, 9)
    assert found["way_out"].estimate == 0.1


def test_risk_sets_by_hand() -> None:
    # Violations: episode 0 at step 1, episode 1 at step 2, episode 2 at step 1.
    # Following next, from step 1 on: episode 3 at step 2, episode 4 at step 4 (beyond the window), 1 and 2 no more;
    # from step 2 on: episode 3 at step 2, episode 4 at step 4. Episode 5 follows before both, and 6 after it violated.
    # Pairs: (0, 3), (1, 3), (1, 4), (2, 3); for the violation of episode 6 at step 0: (6, 1), (6, 2), (6, 3), (6, 5).
    found = judged("iv", "fIv", "FV", "iiF", "iiiif", "FI", "vf", window=2)["risk_set"]
    assert (found.k, found.n) == (4, 8)
    # Gains: 1, 1, 0 (followed, yet no good move), 0 (its violation was one), then 0, 1, 1, 1.
    assert found.estimate == pytest.approx(5 / 8)


def test_other_task_types_do_not_compare() -> None:
    labels, outcomes = steps("iv", "IF")
    settings = AuditSettings(min_episodes=1)
    weights = cluster_weights(2, 100)
    same = judge(labels, outcomes, (0, 1), weights, settings)
    other = judge(
        LabelledSteps(labels.episode, labels.position, labels.good, np.array([0, 1])),
        outcomes,
        (0, 1),
        weights,
        settings,
    )
    assert [found.checks[1].n for found in (same, other)] == [1, 0]


def test_steps_after_an_error_count_nowhere() -> None:
    found = judged("vxx", "FI", "fi")
    assert found["trigger_rate"].n == 5
    assert (found["errors"].k, found["errors"].n, found["errors"].state) == (1, 3, "failed")


def test_bands() -> None:
    def rate(fired: int, n: int) -> str:
        return judged("v" * fired + "i" * (n - fired))["trigger_rate"].state

    assert rate(4, 1000) == "open"  # 0.4 %; the interval reaches 1 %
    assert rate(0, 5000) == "failed"
    assert rate(5, 1000) == "passed"
    assert rate(501, 1000) == "failed"

    def stopped(stopped: int, n: int) -> str:
        return judged("V" * stopped + "I" * (n - stopped))["false_positives"].state

    assert stopped(0, 19) == "open"
    assert stopped(5, 19) == "failed"
    assert stopped(2, 100) == "passed"
    assert stopped(3, 100) == "failed"
