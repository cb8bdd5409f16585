"""Training rows: the token sequences of episodes with what a loss needs to know about each token, and their batching.

One :class:`~train.trajectory.Context` becomes one row, so that an append-only episode costs one row however many turns
it has. Nothing is tokenised here: the ids are those that the model saw and sampled.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from train.trajectory import Context, Episode, Role

LENGTH_MULTIPLE = 64
"""Rows are padded to a multiple of this: odd lengths are slow (a quarter of the throughput on CPU)."""


@dataclass(frozen=True)
class Row:
    """One sequence of T tokens; every list has length T.

    ``trained``: tokens that carry loss. ``logprobs``: log-probability under the distribution that the token was
    sampled from; NaN where no sampler gave one (prompts, demonstrations). ``steps``: index of the episode step that
    generated the token, -1 for tokens that no call generated.
    """

    ids: list[int]
    trained: list[bool]
    logprobs: list[float]
    steps: list[int]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def trained_tokens(self) -> int:
        return sum(self.trained)


ACTIONS: tuple[Role, ...] = ("action",)


def rows_of(episode: Episode, roles: Collection[Role] = ACTIONS) -> list[Row]:
    """The rows of an episode: one per context with tokens that ``roles`` wrote, cut after the last of them.

    Raises:
        ValueError: a span that lies outside its context, overlaps another, starts at the first token (which nothing
            predicts), or whose log-probabilities do not match its length.
    """
    rows = [_row(context, roles, f"episode {episode.id}, context {i}") for i, context in enumerate(episode.contexts)]
    return [row for row in rows if row.ids]


def _row(context: Context, roles: Collection[Role], where: str) -> Row:
    size = len(context.ids)
    trained = [False] * size
    logprobs = [math.nan] * size
    steps = [-1] * size
    covered = 1  # nothing predicts the first token
    for span in sorted(context.spans, key=lambda span: span.start):
        if not covered <= span.start <= span.end <= size:
            raise ValueError(
                f"{where}: span {span.start}:{span.end} must lie in {covered}:{size} (after the first token and the "
                "previous span); the trajectory is damaged, collect it again"
            )
        covered = span.end
        count = span.end - span.start
        if span.logprobs is not None:
            if len(span.logprobs) != count:
                raise ValueError(
                    f"{where}: span {span.start}:{span.end} has {len(span.logprobs)} log-probabilities for {count} "
                    "tokens; the trajectory is damaged, collect it again"
                )
            logprobs[span.start : span.end] = span.logprobs
        trained[span.start : span.end] = [span.trained and span.role in roles] * count
        steps[span.start : span.end] = [span.step] * count
    end = max((i + 1 for i, flag in enumerate(trained) if flag), default=0)
    return Row(context.ids[:end], trained[:end], logprobs[:end], steps[:end])


def padded_length(length: int) -> int:
    """``length`` rounded up to a multiple of LENGTH_MULTIPLE."""
    return -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Group row indices into micro-batches of at most ``budget`` padded tokens (rows x padded length of the longest).

    Rows are sorted by length, longest first, so that padding is small and a lack of memory shows at once. Every index
    appears exactly once; a row that is longer than the budget gets a micro-batch of its own.
    """
    batches: list[list[int]] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * width <= budget:
            batches[-1].append(index)
        else:
            width = padded_length(lengths[index])
            batches.append([index])
    return batches


def shares(lengths: Sequence[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """The micro-batches of each rank: longest rows first, each to the rank with the fewest padded tokens so far.

    Every index appears exactly once. Ranks that would have fewer micro-batches get empty ones: each must take part in
    every pass of a sharded model.
    """
    members: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = loads.index(min(loads))
        members[rank].append(index)
        loads[rank] += padded_length(lengths[index])
    packed = [[[own[i] for i in batch] for batch in pack([lengths[i] for i in own], budget)] for own in members]
    most = max(map(len, packed))
    return [batches + [[] for _ in range(most - len(batches))] for batches in packed]


def padded_tokens(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> int:
    """Tokens of all micro-batches, padding included."""
    return sum(len(batch) * padded_length(max(lengths[i] for i in batch)) for batch in batches)


def padding_share(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """Share of padding among all tokens of the micro-batches, in [0, 1); 0 for none."""
    padded = padded_tokens(lengths, batches)
    return 1 - sum(lengths[i] for batch in batches for i in batch) / padded if padded else 0.0
