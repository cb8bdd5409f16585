"""Sampling distributions and draws, against values worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from train.chat import Sampling
from train.sampling import draw, sampling_logprobs

pytestmark = pytest.mark.unit

# softmax of these logits: 0.1, 0.4, 0.3, 0.2
LOGITS = [math.log(1), math.log(4), math.log(3), math.log(2)]


def probabilities(sampling: Sampling) -> list[float]:
    return sampling_logprobs(torch.tensor([LOGITS]), [sampling])[0].exp().tolist()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1), [0.1, 0.4, 0.3, 0.2]),
        # temperature 0.5 squares the odds 1 : 4 : 3 : 2
        (Sampling(1, temperature=0.5), [1 / 30, 16 / 30, 9 / 30, 4 / 30]),
        (Sampling(1, top_k=2), [0, 4 / 7, 3 / 7, 0]),
        (Sampling(1, top_k=9), [0.1, 0.4, 0.3, 0.2]),
        (Sampling(1, top_p=0.65), [0, 4 / 7, 3 / 7, 0]),
        (Sampling(1, top_p=0.75), [0, 4 / 9, 3 / 9, 2 / 9]),
        (Sampling(1, top_p=0.01), [0, 1, 0, 0]),
        # top-p applies to what top-k left: 4/9 + 3/9 reach 0.75
        (Sampling(1, top_k=3, top_p=0.75), [0, 4 / 7, 3 / 7, 0]),
        # greedy: the whole distribution at temperature 1
        (Sampling(1, temperature=0, top_k=1, top_p=0.1), [0.1, 0.4, 0.3, 0.2]),
    ],
)
def test_distribution(sampling: Sampling, expected: list[float]) -> None:
    assert probabilities(sampling) == pytest.approx(expected, abs=1e-6)


def test_rows_have_their_own_parameters_and_bfloat16_is_computed_in_float32() -> None:
    rows = sampling_logprobs(
        torch.zeros(2, 4, dtype=torch.bfloat16), [Sampling(1, top_k=1), Sampling(1, temperature=0)]
    )
    assert rows.dtype == torch.float32
    assert sorted(rows[0].exp().tolist()) == [0, 0, 0, 1]
    assert rows[1].tolist() == pytest.approx([-math.log(4)] * 4)


def test_a_draw_inverts_the_cumulative_distribution() -> None:
    """Cumulative: 0.1, 0.5, 0.8, 1.0."""
    uniforms = [0.0, 0.05, 0.2, 0.49, 0.6, 0.79, 0.81, 1 - 2**-53]
    how = [Sampling(1)] * len(uniforms)
    rows = sampling_logprobs(torch.tensor([LOGITS] * len(uniforms)), how)
    assert draw(rows, how, uniforms).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_greedy_and_sampled_rows_mix() -> None:
    how = [Sampling(1, temperature=0), Sampling(1), Sampling(1, temperature=0)]
    rows = sampling_logprobs(torch.tensor([LOGITS] * 3), how)
    assert draw(rows, how, [0.99, 0.99, 0.0]).tolist() == [1, 3, 1]
    assert draw(rows[:1], how[:1], [0.99]).tolist() == [1]


@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40),
    top_k=st.integers(0, 8),
    top_p=st.floats(0.05, 1),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_a_draw_never_leaves_the_distribution(logits: list[float], top_k: int, top_p: float, uniform: float) -> None:
    how = [Sampling(1, top_k=top_k, top_p=top_p)]
    rows = sampling_logprobs(torch.tensor([logits]), how)
    assert rows.exp().sum().item() == pytest.approx(1, abs=1e-5)
    token = int(draw(rows, how, [uniform]))
    assert rows[0, token] > -math.inf
    assert top_k == 0 or int((rows > -math.inf).sum()) <= top_k
