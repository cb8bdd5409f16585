from __future__ import annotations

from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.significance import risk_difference, stratified_test

pytestmark = pytest.mark.unit


def test_one_table_is_fishers_exact_test() -> None:
    # 3 of 3 against 0 of 3: one of comb(6, 3) = 20 ways.
    assert stratified_test([(3, 3, 3, 0)]) == pytest.approx(1 / 20)
    # 3 of 4 against 1 of 4: (comb(4,3) * comb(4,1) + comb(4,4) * comb(4,0)) / comb(8,4) = 17 / 70.
    assert stratified_test([(4, 3, 4, 1)]) == pytest.approx(17 / 70)


def test_strata_add_up() -> None:
    # Twice 1 of 1 against 0 of 1: each has probability 1/2, both together 1/4.
    assert stratified_test([(1, 1, 1, 0), (1, 1, 1, 0)]) == pytest.approx(1 / 4)


def test_a_stratum_in_which_all_break_says_nothing() -> None:
    assert stratified_test([(5, 5, 0, 0), (3, 3, 3, 0)]) == pytest.approx(1 / 20)
    assert stratified_test([(40, 40, 0, 0)]) == 1.0
    assert stratified_test([]) == 1.0


def test_risk_difference_weighs_strata() -> None:
    assert risk_difference([(4, 3, 4, 1)]) == pytest.approx(0.5)
    # Differences 1 (weight 1*1/2) and 0 (weight 3*1/4): 0.5 / 1.25.
    assert risk_difference([(1, 1, 1, 0), (3, 3, 1, 1)]) == pytest.approx(0.4)
    assert risk_difference([(5, 5, 0, 0)]) == 0.0


@given(st.integers(0, 12), st.integers(0, 12), st.data())
def test_the_distribution_is_hypergeometric(breaking: int, keeping: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, breaking + keeping))
    least = max(0, bad - keeping)
    hit = data.draw(st.integers(least, min(bad, breaking)))
    expected = sum(
        comb(bad, k) * comb(breaking + keeping - bad, breaking - k) for k in range(hit, min(bad, breaking) + 1)
    ) / comb(breaking + keeping, breaking)
    assert stratified_test([(breaking, hit, keeping, bad - hit)]) == pytest.approx(expected)
