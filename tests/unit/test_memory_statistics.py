import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.statistics import (
    cluster_weights,
    holm,
    newcombe_interval,
    paired_effect,
    student_quantile,
    student_tail,
    wilson_interval,
)

pytestmark = pytest.mark.unit


def test_newcombe_interval_against_published_values() -> None:
    # Newcombe 1998 (Stat Med 17:873), table II, method 10
    assert newcombe_interval(56, 70, 48, 80) == pytest.approx((0.0524, 0.3339), abs=1e-4)
    assert newcombe_interval(9, 10, 3, 10) == pytest.approx((0.1705, 0.8090), abs=1e-4)
    assert newcombe_interval(10, 10, 0, 10) == pytest.approx((0.6075, 1.0), abs=1e-4)
    assert newcombe_interval(0, 0, 3, 10) == (-1.0, 1.0)


@given(st.integers(0, 50), st.integers(1, 50), st.integers(0, 50), st.integers(1, 50))
def test_newcombe_interval_holds_the_difference_and_mirrors(x: int, m: int, y: int, n: int) -> None:
    x, y = min(x, m), min(y, n)
    low, high = newcombe_interval(x, m, y, n)
    assert -1 - 1e-9 <= low <= x / m - y / n <= high <= 1 + 1e-9
    assert newcombe_interval(y, n, x, m) == pytest.approx((-high, -low))


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (15, 2.131), (16, 2.120), (120, 1.980)]
)
def test_student_against_the_table(freedom: int, quantile: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(quantile, abs=5e-4)
    assert student_tail(quantile, freedom) == pytest.approx(0.025, abs=5e-5)
    assert student_tail(-quantile, freedom) == pytest.approx(0.975, abs=5e-5)
    assert student_tail(0.0, freedom) == 0.5


def test_holm_by_hand() -> None:
    # In order: 0.005 x 4, 0.01 x 3, 0.03 x 2, and 0.04 x 1, which may not be below the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.04]) == [0.04]
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_cluster_weights_draw_as_many_clusters_as_there_are() -> None:
    weights = cluster_weights(7, samples=50, seed=3)
    assert weights.shape == (50, 7)
    assert (weights.sum(axis=1) == 7).all()


def test_paired_effect_by_hand() -> None:
    same = {name: [0.5, 0.5] for name in "abcd"}
    assert paired_effect(same, same) == paired_effect(same, same)
    effect = paired_effect(same, same)
    assert (effect.difference, effect.low, effect.high, effect.p, effect.n) == (0.0, 0.0, 0.0, 1.0, 4)
    # All four gain 1: every resample has the mean 1.
    better = paired_effect({name: [0.0] for name in "abcd"}, {name: [1.0] for name in "abcd"})
    assert (better.difference, better.low, better.high) == (1.0, 1.0, 1.0)
    assert better.p < 0.05
    with pytest.raises(ValueError, match="needs two at least"):
        paired_effect({"a": [0.0]}, {"a": [1.0]})


def test_made_up_items_by_hand() -> None:
    same = {"a": [0.5], "b": [0.5]}
    # Resampled are 0, 0, 1 and -1. All four draws are -1 in 1 of 256 resamples, more than the 0.00012 that the expanded
    # interval cuts off (Student's 3.182 for 3 degrees of freedom, times the root of 4/3).
    effect = paired_effect(same, same, pseudo=1.0)
    assert (effect.difference, effect.low, effect.high, effect.n) == (0.0, -1.0, 1.0, 2)
    assert effect.p == 1.0
    many = {str(i): [0.5] for i in range(24)}
    effect = paired_effect(many, many, pseudo=0.5)
    assert -0.1 < effect.low < 0 < effect.high < 0.1
    # The interval leans towards 0 but never leaves the difference out.
    one = paired_effect({"a": [0.0], "b": [0.0]}, {"a": [1.0], "b": [1.0]}, pseudo=0.5)
    assert one.low < 1.0 <= one.high


def test_made_up_items_keep_intervals_true_where_few_items_differ() -> None:
    """8 items won with 0.02, one in ten of which gains 0.78 (mean 0.078); two samples an arm, 300 experiments."""
    generator = np.random.default_rng(1)
    covered = {0.0: 0, 0.5: 0}
    for seed in range(300):
        mended = generator.random(8) < 0.1
        arms = [np.full(8, 0.02), np.where(mended, 0.8, 0.02)]
        before, after = ({str(i): generator.binomial(1, p, 2).tolist() for i, p in enumerate(arm)} for arm in arms)
        for pseudo in covered:
            effect = paired_effect(before, after, samples=2000, seed=seed, pseudo=pseudo)
            covered[pseudo] += effect.low <= 0.078 <= effect.high
    print(covered)
    assert covered[0.5] >= 279, covered  # 93 %
    assert covered[0.0] < 240, covered  # 80 %: what the made-up items are for


def test_p_agrees_with_the_interval() -> None:
    """p < 0.05 just when the 95 % interval does not hold zero."""
    generator = np.random.default_rng(5)
    below, above = 0, 0
    for seed in range(60):
        gains = generator.normal(0.25, 0.5, 16)
        effect = paired_effect(
            {str(i): [0.0] for i in range(16)},
            {str(i): [gain] for i, gain in enumerate(gains)},
            samples=5000,
            seed=seed,
        )
        if abs(effect.p - 0.05) > 0.005:
            assert (effect.p < 0.05) == (effect.low > 0 or effect.high < 0)
            below, above = below + (effect.p < 0.05), above + (effect.p > 0.05)
    assert below > 10
    assert above > 10


def test_intervals_of_few_tasks_cover_and_hold_their_level() -> None:
    """16 tasks that differ in difficulty, two samples per arm, true effect known: 95 % intervals, expanded."""
    generator = np.random.default_rng(0)
    covered = falsely_accepted = 0
    for seed in range(400):
        without = generator.uniform(0.1, 0.8, 16)
        effect = 0.2 if seed % 2 else 0.0
        before = {str(i): generator.binomial(1, p, 2).tolist() for i, p in enumerate(without)}
        after = {str(i): generator.binomial(1, p + effect, 2).tolist() for i, p in enumerate(without)}
        found = paired_effect(before, after, samples=2000, seed=seed)
        covered += found.low <= effect <= found.high
        falsely_accepted += effect == 0 and found.low > 0
    assert covered >= 370  # of 400: 92.5 %, expected 95 to 97
    assert falsely_accepted <= 11  # of 200: 5.5 %, expected 1 to 2.5


def test_wilson_is_where_train_takes_it_from() -> None:
    from train import metrics

    assert metrics.wilson_interval is wilson_interval
