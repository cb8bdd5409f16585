import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.advantages import (
    discounted_returns,
    group_advantages,
    has_signal,
    penalised_rewards,
    step_advantages,
    token_advantages,
)
from train.config import GrpoConfig
from train.trajectory import Episode, Step

pytestmark = pytest.mark.unit


def test_hand_worked_group() -> None:
    # Returns 1, 0, 0, 1: mean 0.5, sample variance 4 * 0.25 / 3 = 1/3, standard deviation 0.57735.
    expected = 0.5 / (0.5773502691896257 + 1e-4)
    assert group_advantages([1, 0, 0, 1], normalise_std=True) == pytest.approx(
        [expected, -expected, -expected, expected]
    )
    assert group_advantages([1, 0, 0, 1], normalise_std=False) == [0.5, -0.5, -0.5, 0.5]


def test_two_episodes() -> None:
    # Returns 0.9, 0.1: mean 0.5, standard deviation sqrt(0.32) = 0.565685.
    expected = 0.4 / (0.5656854249492381 + 1e-4)
    assert group_advantages([0.9, 0.1], normalise_std=True) == pytest.approx([expected, -expected])


@pytest.mark.parametrize("value", [0.1, 0.0, 1 / 3, -0.7])
@pytest.mark.parametrize("normalise_std", [True, False])
def test_equal_returns_have_no_signal(value: float, normalise_std: bool) -> None:
    advantages = group_advantages([value] * 3, normalise_std=normalise_std)
    assert advantages == [0.0, 0.0, 0.0]
    assert not has_signal([advantages])
    assert has_signal([[0.0], [0.0, -1e-9]])


def test_a_single_episode_and_none() -> None:
    assert group_advantages([0.3], normalise_std=True) == [0.0]
    assert group_advantages([], normalise_std=True) == []


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8), st.booleans())
def test_advantages_sum_to_zero_and_keep_the_order(returns: list[float], normalise_std: bool) -> None:
    advantages = group_advantages(returns, normalise_std=normalise_std)
    assert sum(advantages) == pytest.approx(0, abs=1e-8)
    ordered = [advantages[i] for i in sorted(range(len(returns)), key=returns.__getitem__)]
    assert ordered == sorted(ordered)


def test_leave_one_out_compares_with_the_others() -> None:
    # Returns 1, 0, 0.5: the means of the others are 0.25, 0.75, 0.5.
    advantages = group_advantages([1.0, 0.0, 0.5], normalise_std=False, baseline="leave_one_out")
    assert advantages == pytest.approx([0.75, -0.75, 0.0])
    assert group_advantages([0.3], normalise_std=False, baseline="leave_one_out") == [0.0]


def test_discounted_returns_by_hand() -> None:
    # 1; 0 + 0.5 * 1; 2 + 0.5 * 0.5.
    assert discounted_returns([2.0, 0.0, 1.0], 0.5) == [2.25, 0.5, 1.0]
    assert discounted_returns([], 0.5) == []


def test_step_advantages_by_hand() -> None:
    # State a is met by step 0 of both episodes and again by step 2 of the first: returns 1, 0.5, 4 -> mean 11/6.
    # State b by step 1 of the first alone: 0. State c by both: 3 and 1 -> mean 2.
    advantages = step_advantages(
        [[1.0, 9.0, 4.0, 3.0], [0.5, 1.0]], [["a", "b", "a", "c"], ["a", "c"]], normalise_std=False
    )
    assert advantages[0] == pytest.approx([1 - 11 / 6, 0.0, 4 - 11 / 6, 1.0])
    assert advantages[1] == pytest.approx([0.5 - 11 / 6, -1.0])
    # With the spread: 3 and 1 have the sample standard deviation sqrt(2).
    normalised = step_advantages([[3.0], [1.0]], [["c"], ["c"]], normalise_std=True)
    assert normalised == [[pytest.approx(1 / (2**0.5 + 1e-4))], [pytest.approx(-1 / (2**0.5 + 1e-4))]]


def played(*steps: tuple[str, float, bool], states: tuple[str, ...] = ()) -> Episode:
    """An episode of (observation, reward, valid)."""
    return Episode(
        id="e",
        phase="collect",
        env="household",
        task="t",
        task_type="pick",
        seed=0,
        steps=[
            Step(
                index=i,
                observation=seen,
                text="",
                action="x",
                reward=reward,
                valid=valid,
                state=states[i] if states else "",
            )
            for i, (seen, reward, valid) in enumerate(steps)
        ],
    )


def settings(**fields) -> GrpoConfig:
    return GrpoConfig(tasks="household/easy/train:0-1", normalise_std=False, **fields)


def test_invalid_actions_cost_where_they_were_made() -> None:
    assert penalised_rewards(played(("s", 0.0, False), ("s", 1.0, True)), 0.05) == [-0.05, 1.0]


def test_token_advantages_of_grpo_and_gigpo_by_hand() -> None:
    """Both start in s. One goes on to t and wins; the other wastes a step in s, goes to t and loses."""
    group = [
        played(("s", 0.0, True), ("t", 1.0, True)),
        played(("s", 0.0, False), ("s", 0.0, True), ("t", 0.0, True)),
    ]
    # Returns 1 and -0.1 (penalty 0.1): advantages 0.55 and -0.55.
    plain = token_advantages(group, settings(invalid_penalty=0.1))
    assert plain == [pytest.approx([0.55] * 2), pytest.approx([-0.55] * 3)]
    # gamma 0.5. Discounted returns: 0.5, 1 | -0.1, 0, 0. In s: 0.5, -0.1, 0 (mean 2/15); in t: 1, 0 (mean 0.5).
    both = token_advantages(group, settings(invalid_penalty=0.1, step_weight=2.0, gamma=0.5))
    assert both[0] == pytest.approx([0.55 + 2 * (0.5 - 2 / 15), 0.55 + 2 * 0.5])
    assert both[1] == pytest.approx([-0.55 + 2 * (-0.1 - 2 / 15), -0.55 + 2 * (0 - 2 / 15), -0.55 - 2 * 0.5])


def test_an_all_success_group_still_has_step_signal_and_supplied_states_win_over_observations() -> None:
    quick, slow = played(("s", 1.0, True)), played(("s", 0.0, True), ("u", 1.0, True))
    assert not has_signal(token_advantages([quick, slow], settings()))
    # Discounted returns in s: 1 and 0.5.
    gigpo = settings(step_weight=1.0, gamma=0.5)
    assert token_advantages([quick, slow], gigpo) == [pytest.approx([0.25]), pytest.approx([-0.25, 0.0])]
    apart = played(("s", 0.0, True), ("u", 1.0, True), states=("elsewhere", "u"))
    assert not has_signal(token_advantages([quick, apart], gigpo))


def test_dense_rewards_credit_the_steps_that_earned_them() -> None:
    # Score differences 0.2, 0.3 against 0.0, 0.3 over the same two states: the first step differs, the second does not.
    group = [played(("a", 0.2, True), ("b", 0.3, True)), played(("a", 0.0, True), ("b", 0.3, True))]
    advantages = token_advantages(group, settings(step_weight=1.0, gamma=1.0))
    assert advantages == [pytest.approx([0.1 + 0.1, 0.1]), pytest.approx([-0.1 - 0.1, -0.1])]
