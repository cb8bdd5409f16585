from collections.abc import Sequence

import pytest

from memory.usage import Recall
from train.metrics import failure_class, paired_bootstrap, repeated_actions, spl, summarise, wilson_interval
from train.trajectory import Episode, Status, Step

pytestmark = pytest.mark.unit


def episode(
    actions: str,
    *,
    task: str = "a",
    kind: str = "t",
    won: bool = False,
    invalid: str = "",
    status: Status = "ok",
    truncated: bool = False,
    expert_steps: int | None = None,
    scores: Sequence[float] = (),
) -> Episode:
    """Each letter is an action and its answer; letters in ``invalid`` are refused; ``scores``: after each action."""
    steps = [
        Step(
            index=i,
            observation="",
            text=letter,
            action=letter,
            result=letter,
            valid=letter not in invalid,
            score=scores[i] if scores else 0.0,
        )
        for i, letter in enumerate(actions)
    ]
    return Episode(
        id="e",
        phase="p",
        env="household",
        task=task,
        task_type=kind,
        seed=0,
        won=won,
        score=float(won),
        status=status,
        truncated=truncated,
        steps=steps,
        expert_steps=expert_steps,
    )


def test_wilson_interval_against_published_values() -> None:
    # Newcombe 1998, table I: 81 of 263 gives 0.2553 to 0.3662; 0 of 20 gives 0 to 0.1611
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_spl() -> None:
    assert spl(True, 8, 4) == 0.5
    assert spl(True, 3, 4) == 1.0
    assert spl(False, 4, 4) == 0.0


def test_repeated_actions_need_the_same_answer() -> None:
    repeated = episode("abab")
    assert repeated_actions(repeated) == 2
    changed = repeated.model_copy(
        update={"steps": [step.model_copy(update={"result": str(i)}) for i, step in enumerate(repeated.steps)]}
    )
    assert repeated_actions(changed) == 0


@pytest.mark.parametrize(
    ("played", "expected"),
    [
        (episode("ab", won=True), None),
        (episode("", status="env_error"), "fault"),
        (episode("ab", won=True, status="env_error"), "fault"),
        # 2 of 4 turns refused; 1 of 3 is less than half
        (episode("abxx", invalid="x"), "invalid"),
        (episode("abx", invalid="x"), "knowledge"),
        # 3 of 6 turns repeat; 2 of 6 are a third; 1 of 4 is less
        (episode("abcabc", truncated=True), "execution"),
        (episode("abcdab", truncated=True), "execution"),
        (episode("abca", truncated=True), "knowledge"),
        # refused and repeated: the earlier rule
        (episode("xxxx", invalid="x"), "invalid"),
        # cut at 6 steps: a solution of 4 takes less than twice as many, one of 3 does not
        (episode("abcdef", truncated=True, expert_steps=4), "budget"),
        (episode("abcdef", truncated=True, expert_steps=3), "knowledge"),
        (episode("abcdef", truncated=True), "knowledge"),
        # the score rose in the last two of eight turns, or before them only
        (episode("abcdefgh", truncated=True, scores=[0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2, 0.2]), "budget"),
        (episode("abcdefgh", truncated=True, scores=[0, 0.1, 0.1, 0.1, 0.1, 0.2, 0.2, 0.2]), "knowledge"),
        # what ended by itself was not cut off, however it stood
        (episode("abcdef", expert_steps=4), "knowledge"),
        (episode("a", truncated=True, scores=[0.5]), "knowledge"),
    ],
)
def test_failure_class(played: Episode, expected: str | None) -> None:
    assert failure_class(played) == expected


def test_summary_counts_faults_and_averages_seeds_first() -> None:
    episodes = [
        episode("ab", task="1", won=True, expert_steps=2),
        episode("abcd", task="1", expert_steps=2),
        episode("abxx", task="2", kind="u", invalid="x", expert_steps=4),
        episode("", task="3", kind="u", status="env_error"),
    ]
    summary = summarise(episodes)
    assert (summary["episodes"], summary["items"], summary["faults"]) == (4, 3, 1)
    assert summary["success"] == pytest.approx((0.5 + 0 + 0) / 3)
    assert summary["success_interval"] == pytest.approx(list(wilson_interval(0.5, 3)))
    assert summary["steps"] == 2.5
    assert summary["invalid_rate"] == 0.2
    assert summary["spl"] == pytest.approx(1 / 3)
    assert summary["failures"] == {"fault": 1, "invalid": 1, "knowledge": 1}
    assert list(summary["by_type"]) == ["t", "u"]
    assert summary["by_type"]["t"]["success"] == 0.5


def test_summary_tells_how_often_a_thought_was_recalled_and_followed() -> None:
    played = episode("abcd")
    recalls = [
        Recall(snapshot="q", state=3, thought="go", followed=True),
        Recall(snapshot="q", state=3, thought="go", followed=False),
        Recall(snapshot="q", state=4, explored=True),
        Recall(snapshot="q"),
    ]
    for step, recall in zip(played.steps, recalls, strict=True):
        step.recall = recall
    summary = summarise([played, episode("ab")])
    rates = (summary["state_found_rate"], summary["recalled_rate"], summary["followed_rate"])
    assert rates == (0.75, 0.5, 0.5)
    assert summarise([episode("ab")])["recalled_rate"] is None


def test_paired_bootstrap_by_hand() -> None:
    # Differences 1, 0, 0, 0 (b: two seeds, mean 0.5 both times). The resampled mean is Binomial(4, 1/4) / 4: its 2.5 %
    # quantile is 0 and its 97.5 % quantile 3/4, since P(X >= 3) = 0.0508 and P(X = 4) = 0.0039.
    before = {"a": [0.0], "b": [0.0, 1.0], "c": [1.0], "d": [0.0]}
    after = {"a": [1.0], "b": [1.0, 0.0], "c": [1.0], "d": [0.0]}
    assert paired_bootstrap(before, after) == (0.25, 0.0, 0.75)
    assert paired_bootstrap(before, before) == (0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="4 and 3 items that are not the same"):
        paired_bootstrap(before, {name: after[name] for name in "abc"})
