import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.advantages import group_advantages, has_signal, penalised_return
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
    assert not has_signal(advantages)
    assert has_signal([0.0, 0.0, -1e-9])


def test_a_single_episode_and_none() -> None:
    assert group_advantages([0.3], normalise_std=True) == [0.0]
    assert group_advantages([], normalise_std=True) == []


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8), st.booleans())
def test_advantages_sum_to_zero_and_keep_the_order(returns: list[float], normalise_std: bool) -> None:
    advantages = group_advantages(returns, normalise_std=normalise_std)
    assert sum(advantages) == pytest.approx(0, abs=1e-8)
    ordered = [advantages[i] for i in sorted(range(len(returns)), key=returns.__getitem__)]
    assert ordered == sorted(ordered)


def test_penalised_return_counts_each_invalid_action() -> None:
    steps = [Step(index=i, observation="", text="", action="look", valid=i not in (1, 2)) for i in range(4)]
    episode = Episode(
        id="e", phase="collect", env="household", task="t", task_type="pick", seed=0, episode_return=1.0, steps=steps
    )
    assert penalised_return(episode, 0.05) == pytest.approx(0.9)
    assert penalised_return(episode, 0.0) == 1.0
