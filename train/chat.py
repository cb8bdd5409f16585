"""``ChatModel``: the one interface to a language model, token in and token out.

The policy's conversation is held as token ids (:mod:`train.tokens`); ids and sampling log-probabilities come back and
are never re-tokenised. Implementations: :mod:`train.hf_model` (in process), :mod:`train.server_model`
(OpenAI-compatible server, vLLM) and :mod:`train.scripted_model` (tests).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol


class ModelFault(RuntimeError):
    """A model call failed for good (server down, out of memory, answer without tokens)."""


class ModelLost(RuntimeError):
    """The model is gone and no later call can succeed: it ends the run, where a :class:`ModelFault` ends an episode."""


@dataclass(frozen=True)
class Sampling:
    """Explicit sampling parameters of one call; no model default applies.

    ``temperature`` 0 is greedy. ``seed`` keys the random numbers of this call alone (episode, turn, attempt), so that
    a sample does not depend on what else is in the batch. The policy is always sampled
    with the defaults of ``top_p`` and ``top_k``, which cut nothing off.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Generation:
    """One completion.

    ``token_ids`` and ``logprobs`` have equal length; the end-of-turn token is included when the model wrote it
    (``finish`` "stop") and absent when the length limit cut it (``finish`` "length"). ``logprobs`` are those of the
    sampling distribution (after temperature and truncation; greedy: of the temperature-1 distribution).
    ``text`` is the decoded completion without special tokens. ``adapter`` is the version that produced it.
    """

    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Literal["stop", "length"] = "stop"
    prompt_tokens: int = 0
    adapter: str = "base"


class ChatModel(Protocol):
    """A language model that continues token sequences. Safe to call from many coroutines at once."""

    name: str
    adapter: str
    """Version of the adapter now active: "base", or a name such as "policy-v0003"."""

    async def complete(self, prompt_ids: list[int], sampling: Sampling, conversation: str) -> Generation:
        """Continue ``prompt_ids``.

        ``conversation`` keys the key-value cache: a prompt that extends the conversation's previous prompt and
        completion is prefilled from where they agree. Raises ModelFault.
        """

    def release(self, conversation: str) -> None:
        """Forget the cache of a conversation that has ended (or raised)."""

    async def close(self) -> None:
        """Free the model. May be called twice."""
