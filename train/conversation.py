"""The dialogue of one episode, held as token ids: append-only until the context budget forces a rewrite."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from train.chat import Generation
from train.tokens import Codec
from train.trajectory import Context, Role, Span


@dataclass
class _Turn:
    """A user message and, once given, the reply to it (before: the opening that the reply goes on from)."""

    user: str
    reply: list[int]
    closed: bool = True


@dataclass(frozen=True)
class _Mark:
    """Where the dialogue stood after a reply: numbers of turns, contexts, and the last context's ids and spans; and
    whether the reply was to be trained."""

    turns: int
    contexts: int
    ids: int
    spans: int
    trained: bool


class Conversation:
    """Token in, token out: generated ids are kept as they were sampled and never re-tokenised.

    Rule of the budget: when the next prompt plus ``max_new_tokens`` would exceed ``context_tokens``, the oldest turns
    are dropped until the prompt takes at most half of ``context_tokens``; the system prompt, the task with the first
    observation, and the newest user message always stay, and a note says how many turns were left out. With
    ``last_turns`` every prompt is built anew from the first and the last so many turns (fewer where the budget is
    short). A rewritten prompt starts a new :class:`~train.trajectory.Context`; replies copied into it carry no span
    there, so that every generated token lies in exactly one span.
    """

    def __init__(
        self,
        codec: Codec,
        system: str,
        *,
        context_tokens: int,
        observation_tokens: int,
        max_new_tokens: int,
        last_turns: int | None = None,
    ) -> None:
        self._codec = codec
        self._system = system
        self._budget = context_tokens
        self._observation_tokens = observation_tokens
        self._max_new_tokens = max_new_tokens
        self._last_turns = last_turns
        self._turns: list[_Turn] = []
        self._original: _Mark | None = None
        self.contexts: list[Context] = []

    def user(self, observation: str, suffix: str = "", opening: str = "") -> list[int]:
        """Add a user message and return the prompt ids, shape (L,), for the next generation.

        ``observation`` is cut in the middle to ``observation_tokens``. ``suffix`` is appended whole: what is shown in
        this turn only, such as admissible actions or a hint from memory; it stays in the dialogue where it was shown.
        ``opening`` is how the reply begins, given and not generated (a recalled thought); it is never trained.
        """
        self._original = None
        return self._ask(self._cut(observation) + suffix, opening)

    def reply(self, generation: Generation, step: int, role: Role = "action") -> None:
        """Record what the model wrote."""
        self._add(generation.token_ids, generation.finish == "stop")
        context = self.contexts[-1]
        context.spans.append(
            Span(
                start=len(context.ids) - len(generation.token_ids),
                end=len(context.ids),
                step=step,
                role=role,
                adapter=generation.adapter,
                logprobs=generation.logprobs,
            )
        )

    def reject(self, feedback: str, opening: str = "") -> list[int]:
        """Take the last reply for rejected and ask again with ``feedback``; returns the prompt ids, shape (L,).

        The rejected reply stays in the context, out of every loss, unless :meth:`fall_back` follows.
        """
        context = self.contexts[-1]
        if self._original is None:
            self._original = _Mark(
                len(self._turns),
                len(self.contexts),
                len(context.ids),
                len(context.spans),
                context.spans[-1].trained,
            )
        context.spans[-1].trained = False
        return self._ask(feedback, opening)

    def fall_back(self) -> None:
        """Return to the first of the rejected replies, which is executed after all: all that followed it is dropped."""
        if self._original is None:
            raise RuntimeError("fall_back without a rejected reply")
        mark, self._original = self._original, None
        del self._turns[mark.turns :], self.contexts[mark.contexts :]
        context = self.contexts[-1]
        del context.ids[mark.ids :], context.spans[mark.spans :]
        context.spans[-1].trained = mark.trained

    def demonstrate(self, text: str, step: int, *, trained: bool, author: str = "expert") -> None:
        """Record a reply that no model sampled but ``author`` gave; ``trained`` False keeps it out of every loss."""
        ids = self._codec.reply(text)
        self._add(ids, closed=True)
        context = self.contexts[-1]
        end = len(context.ids)
        context.spans.append(Span(start=end - len(ids), end=end, step=step, adapter=author, trained=trained))

    def _ask(self, text: str, opening: str) -> list[int]:
        begun = self._codec.text(opening)
        if not self._turns:
            self._turns.append(_Turn(text, begun))
            self._start_context(self._dialogue(self._turns))
            return list(self.contexts[-1].ids)
        delta = self._codec.turn(text, closed=self._turns[-1].closed) + begun
        self._turns.append(_Turn(text, begun))
        if self._last_turns is not None:
            self._start_context(self._window(self._last_turns))
        elif len(self.contexts[-1].ids) + len(delta) + self._max_new_tokens > self._budget:
            self._start_context(self._shortened(len(self._turns) - 1, self._budget // 2))
        else:
            self.contexts[-1].ids.extend(delta)
        return list(self.contexts[-1].ids)

    def _add(self, ids: list[int], closed: bool) -> None:
        turn = self._turns[-1]
        turn.reply, turn.closed = turn.reply + ids, closed
        self.contexts[-1].ids.extend(ids)

    def _cut(self, text: str) -> str:
        ids = self._codec.text(text)
        if len(ids) <= self._observation_tokens:
            return text
        half = self._observation_tokens // 2
        return f"{self._codec.decode(ids[:half])} […] {self._codec.decode(ids[-half:])}"

    def _window(self, last: int) -> list[int]:
        """The first turn, the ``last`` ones before the newest, and the newest."""
        room = self._budget - self._max_new_tokens
        whole = self._dialogue(self._turns) if len(self._turns) - 1 <= last else None
        return whole if whole and len(whole) <= room else self._shortened(last + 1, room)

    def _shortened(self, keep: int, limit: int) -> list[int]:
        """The first message with the newest turns: ``keep`` of them, or fewer so as to take at most ``limit`` tokens.

        The first kept user message joins the first one.
        """
        first, rest = self._turns[0], self._turns[1:]
        ids: list[int] = []
        for count in range(min(keep, len(rest)), 0, -1):
            head, *kept = rest[-count:]
            note = f"[{len(rest) - count + 1} turns left out]"
            head = _Turn(f"{first.user}\n{note}\n{head.user}", head.reply, head.closed)
            ids = self._dialogue([head, *kept])
            if len(ids) <= limit:
                break
        return ids

    def _dialogue(self, turns: list[_Turn]) -> list[int]:
        """The ids of ``turns`` up to where the newest reply goes on."""
        ids = self._codec.start(self._system, turns[0].user)
        for turn, following in pairwise(turns):
            ids = ids + turn.reply + self._codec.turn(following.user, closed=turn.closed)
        return ids + turns[-1].reply

    def _start_context(self, ids: list[int]) -> None:
        """Raises ValueError when ``ids``, the shortest prompt there is, leaves no room for a reply."""
        if len(ids) + self._max_new_tokens > self._budget:
            raise ValueError(
                f"agent.context_tokens {self._budget}: the task and one observation alone take {len(ids)} tokens; "
                f"raise context_tokens or lower observation_tokens or max_admissible"
            )
        self.contexts.append(Context(ids=ids, spans=[]))
