import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.rows import pack, padded_length, padded_tokens, padding_share, rows_of, shares
from train.trajectory import Context, Episode, Span

pytestmark = pytest.mark.unit


def episode(*contexts: Context) -> Episode:
    return Episode(
        id="e", phase="collect", env="household", task="easy/1", task_type="pick", seed=0, contexts=list(contexts)
    )


def nan_to_none(values: list[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values]


def test_two_contexts_an_untrained_span_and_a_completion_cut_by_length() -> None:
    # First context: prompt 10 11, trained 12 13, observation 14, inserted mistake 15 (untrained), observation 16 17.
    first = Context(
        ids=[10, 11, 12, 13, 14, 15, 16, 17],
        spans=[
            Span(start=2, end=4, step=0, logprobs=[-0.5, -0.25]),
            Span(start=5, end=6, step=1, trained=False),
        ],
    )
    # Second context: the completion was cut by length, so its last token is the context's last one (no end of turn).
    second = Context(ids=[20, 21, 22, 23], spans=[Span(start=2, end=4, step=2, logprobs=[-1.0, -2.0])])
    rows = rows_of(episode(first, second))
    assert [row.ids for row in rows] == [[10, 11, 12, 13], [20, 21, 22, 23]]
    assert [row.trained for row in rows] == [[False, False, True, True], [False, False, True, True]]
    assert [nan_to_none(row.logprobs) for row in rows] == [[None, None, -0.5, -0.25], [None, None, -1.0, -2.0]]
    assert [row.steps for row in rows] == [[-1, -1, 0, 0], [-1, -1, 2, 2]]


def test_untrained_span_before_the_last_trained_one_stays_as_masked_context() -> None:
    context = Context(
        ids=[1, 2, 3, 4, 5, 6],
        spans=[Span(start=1, end=2, step=0, trained=False), Span(start=3, end=5, step=1)],
    )
    (row,) = rows_of(episode(context))
    assert row.ids == [1, 2, 3, 4, 5]
    assert row.trained == [False, False, False, True, True]
    assert row.steps == [-1, 0, -1, 1, 1]
    assert all(math.isnan(value) for value in row.logprobs)


def test_a_context_without_trained_tokens_gives_no_row() -> None:
    assert rows_of(episode(Context(ids=[1, 2, 3], spans=[Span(start=1, end=3, step=0, trained=False)]))) == []
    assert rows_of(episode(Context(ids=[1, 2, 3], spans=[]))) == []


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([Span(start=0, end=2, step=0)], "0:2 must lie in 1:4"),
        ([Span(start=2, end=5, step=0)], "2:5 must lie in 1:4"),
        ([Span(start=1, end=3, step=0), Span(start=2, end=4, step=1)], "2:4 must lie in 3:4"),
        ([Span(start=1, end=3, step=0, logprobs=[-1.0])], "1 log-probabilities for 2 tokens"),
    ],
)
def test_damaged_spans_are_refused(spans: list[Span], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows_of(episode(Context(ids=[1, 2, 3, 4], spans=spans)))


@st.composite
def contexts(draw: st.DrawFn) -> Context:
    """Alternating prompts and generations; token ids are unique so that each can be followed."""
    ids: list[int] = []
    spans: list[Span] = []
    for step in range(draw(st.integers(0, 4))):
        ids += range(len(ids), len(ids) + draw(st.integers(1, 5)))
        count = draw(st.integers(1, 5))
        logprobs = [-float(i) for i in range(len(ids), len(ids) + count)]
        spans.append(
            Span(start=len(ids), end=len(ids) + count, step=step, logprobs=logprobs, trained=draw(st.booleans()))
        )
        ids += range(len(ids), len(ids) + count)
    return Context(ids=ids + [99] * draw(st.integers(0, 3)), spans=spans)


@given(st.lists(contexts(), max_size=3))
def test_every_trained_token_once_with_its_logprob_and_step(made: list[Context]) -> None:
    expected = [
        (context.ids[i], span.logprobs[i - span.start], span.step)
        for context in made
        for span in context.spans
        if span.trained and span.logprobs is not None
        for i in range(span.start, span.end)
    ]
    found = [
        (token, logprob, step)
        for row in rows_of(episode(*made))
        for token, trained, logprob, step in zip(row.ids, row.trained, row.logprobs, row.steps, strict=True)
        if trained
    ]
    assert found == expected
    assert all(row.trained[-1] for row in rows_of(episode(*made)))


def test_pack_by_hand() -> None:
    # Padded lengths: 64, 128, 64, 192, 320. Budget 256: 320 alone (over budget), 192 alone, 128 with 64 at width 128,
    # the last 64 alone would be a third row of width 128.
    lengths = [64, 100, 10, 130, 257]
    assert pack(lengths, 256) == [[4], [3], [1, 0], [2]]
    assert padded_tokens(lengths, pack(lengths, 256)) == 320 + 192 + 256 + 64
    assert padding_share(lengths, pack(lengths, 256)) == pytest.approx(1 - 561 / 832)
    assert pack([], 256) == []
    assert padding_share([], []) == 0.0


@given(st.lists(st.integers(1, 700), max_size=40), st.integers(64, 2048))
def test_pack_keeps_every_row_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = pack(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        width = padded_length(max(lengths[i] for i in batch))
        assert width % 64 == 0
        assert len(batch) * width <= budget or len(batch) == 1


def test_shares_by_hand() -> None:
    # Padded lengths 192, 128, 64, 64 on two ranks: 0 | 1, then 2 to the lighter, 3 to either (tie: 0).
    assert shares([150, 100, 60, 10], 2, budget=192) == [[[0], [3]], [[1], [2]]]
    # One row on three ranks: two take part with nothing.
    assert shares([10], 3, budget=64) == [[[0]], [[]], [[]]]


@given(st.lists(st.integers(1, 700), min_size=1, max_size=30), st.integers(1, 5), st.integers(64, 2048))
def test_ranks_share_every_row_once_in_equally_many_micro_batches(lengths: list[int], ranks: int, budget: int) -> None:
    parts = shares(lengths, ranks, budget)
    assert len(parts) == ranks
    assert len({len(batches) for batches in parts}) == 1
    assert sorted(i for batches in parts for batch in batches for i in batch) == list(range(len(lengths)))
    for batches in parts:
        for batch in batches:
            assert len(batch) <= 1 or len(batch) * padded_length(max(lengths[i] for i in batch)) <= budget
