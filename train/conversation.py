"""The dialogue of one episode, held as token ids: append-only until the context budget forces a rewrite."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from train.chat import Generation
from train.tokens import TokenCodec
from train.trajectory import Context, Span


@dataclass
class _Turn:
    """A user message and, once given, the reply to it."""

    user: str
    reply: list[int]
    closed: bool = True


class Conversation:
    """Token in, token out: generated ids are kept as they were sampled and never re-tokenised.

    Rule of the budget: when the next prompt plus ``max_new_tokens`` would exceed ``context_tokens``, the oldest turns
    are dropped until the prompt takes at most half of ``context_tokens``; the system prompt, the task with the first
    observation, and the newest user message always stay, and a note says how many turns were left out. The rewritten
    prompt starts a new :class:`~train.trajectory.Context`; replies copied into it carry no span there.
    """

    def __init__(
        self,
        codec: TokenCodec,
        system: str,
        *,
        context_tokens: int,
        observation_tokens: int,
        max_new_tokens: int,
    ) -> None:
        self._codec = codec
        self._system = system
        self._budget = context_tokens
        self._observation_tokens = observation_tokens
        self._max_new_tokens = max_new_tokens
        self._turns: list[_Turn] = []
        self.contexts: list[Context] = []

    def user(self, observation: str, suffix: str = "") -> list[int]:
        """Add a user message and return the prompt ids, shape (L,), for the next generation.

        ``observation`` is cut in the middle to ``observation_tokens``; ``suffix`` is appended whole.
        """
        text = self._cut(observation) + suffix
        if not self._turns:
            self._turns.append(_Turn(text, []))
            self.contexts.append(Context(ids=self._fitting(self._codec.start(self._system, text)), spans=[]))
        else:
            last = self._turns[-1]
            delta = self._codec.turn(text, closed=last.closed)
            self._turns.append(_Turn(text, []))
            if len(self.contexts[-1].ids) + len(delta) + self._max_new_tokens > self._budget:
                self._rewrite()
            else:
                self.contexts[-1].ids.extend(delta)
        return list(self.contexts[-1].ids)

    def reply(self, generation: Generation, step: int) -> None:
        """Record what the model wrote."""
        self._add(generation.token_ids, generation.finish == "stop")
        context = self.contexts[-1]
        context.spans.append(
            Span(
                start=len(context.ids) - len(generation.token_ids),
                end=len(context.ids),
                step=step,
                adapter=generation.adapter,
                logprobs=generation.logprobs,
            )
        )

    def demonstrate(self, text: str, step: int, *, trained: bool) -> None:
        """Record a reply that an expert wrote; ``trained`` False keeps it out of every loss."""
        ids = self._codec.reply(text)
        self._add(ids, closed=True)
        context = self.contexts[-1]
        end = len(context.ids)
        context.spans.append(Span(start=end - len(ids), end=end, step=step, adapter="expert", trained=trained))

    def _add(self, ids: list[int], closed: bool) -> None:
        turn = self._turns[-1]
        turn.reply, turn.closed = list(ids), closed
        self.contexts[-1].ids.extend(ids)

    def _cut(self, text: str) -> str:
        ids = self._codec.text(text)
        if len(ids) <= self._observation_tokens:
            return text
        half = self._observation_tokens // 2
        return f"{self._codec.decode(ids[:half])} […] {self._codec.decode(ids[-half:])}"

    def _rewrite(self) -> None:
        first, rest = self._turns[0], self._turns[1:]
        ids: list[int] = []
        for keep in range(len(rest), 0, -1):
            ids = self._prompt_with(first, rest[-keep:], dropped=len(rest) - keep)
            if len(ids) <= self._budget // 2:
                break
        self.contexts.append(Context(ids=self._fitting(ids), spans=[]))

    def _fitting(self, ids: list[int]) -> list[int]:
        """``ids``, the shortest prompt there is. Raises ValueError when it leaves no room for a reply."""
        if len(ids) + self._max_new_tokens > self._budget:
            raise ValueError(
                f"agent.context_tokens {self._budget}: the task and one observation alone take {len(ids)} tokens; "
                f"raise context_tokens or lower observation_tokens or max_admissible"
            )
        return ids

    def _prompt_with(self, first: _Turn, kept: list[_Turn], dropped: int) -> list[int]:
        """``dropped`` turns left out after the first message; the first kept user message joins the first one."""
        note = f"[{dropped + 1} turns left out]"
        ids = self._codec.start(self._system, f"{first.user}\n{note}\n{kept[0].user}")
        for turn, following in pairwise(kept):
            ids = ids + turn.reply + self._codec.turn(following.user, closed=turn.closed)
        return ids
