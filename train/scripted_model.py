"""A chat model whose answers are given beforehand: tests run the whole loop without a language model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from train.chat import Generation, ModelFault, Sampling
from train.tokens import TokenCodec


class ScriptedModel:
    """Answers from a list, in the order of the calls, or from a function of the prompt's text.

    The answers are tokenised as replies (end-of-turn token included) with log-probability 0 each, and cut at
    ``max_tokens`` as a real model's are. ``released`` lists the conversations given back.
    """

    def __init__(self, answers: Iterable[str] | Callable[[str], str], codec: TokenCodec) -> None:
        self.name = "scripted"
        self.adapter = "base"
        self.released: list[str] = []
        self._answer = answers if callable(answers) else self._next
        self._left = iter(()) if callable(answers) else iter(answers)
        self._codec = codec

    def _next(self, prompt: str) -> str:
        try:
            return next(self._left)
        except StopIteration:
            raise ModelFault("scripted model: no answer left; give more answers or a function") from None

    async def complete(self, prompt_ids: list[int], sampling: Sampling, conversation: str) -> Generation:
        """The next answer. Raises ModelFault when the list is at its end."""
        ids = self._codec.reply(self._answer(self._codec.decode(prompt_ids)))
        cut = ids[: sampling.max_tokens]
        return Generation(
            text=self._codec.decode(cut),
            token_ids=cut,
            logprobs=[0.0] * len(cut),
            finish="stop" if cut == ids else "length",
            prompt_tokens=len(prompt_ids),
            adapter=self.adapter,
        )

    def release(self, conversation: str) -> None:
        self.released.append(conversation)

    async def close(self) -> None:
        return None
