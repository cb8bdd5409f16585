"""``HFChatModel``: generation in this process, with continuous batching and key-value caches that live across turns.

One background thread runs the model. Each step of it is one forward pass over the new tokens of all active
conversations (:mod:`train.packed`): requests join and leave between steps, prompts are prefilled beside running
decodes, and only what the cache does not hold is computed. What a cache holds is compared by token ids, so a reused
prefix is right by construction, whoever computed it: a conversation goes on where its last turn ended, and a new one
starts from the longest prefix that any other conversation holds (rollouts of one group share their whole first prompt).
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from train.chat import Generation, ModelFault, Sampling
from train.config import ConfigError
from train.merged import MergedLora
from train.packed import PackedCache, Segment, make_segment, packed_mode
from train.sampling import draw, sampling_logprobs
from train.tokens import TokenCodec

STEP_TOKENS = 512
"""Most tokens of one forward pass. Bounds memory, and the wait of running decodes for another's long prompt."""
SHARED_PREFIX_WORTH_WAITING = 32
"""Tokens. A new conversation waits for a prefill in progress that will save it at least so many."""


@dataclass(eq=False)
class _Slot:
    """A region of the cache, from position ``start`` on. ``held``: the token ids whose keys and values are in it."""

    start: int
    held: list[int] = field(default_factory=list)
    conversation: str | None = None
    busy: bool = False
    used: int = 0


@dataclass(eq=False)
class _Request:
    prompt: list[int]
    sampling: Sampling
    conversation: str
    limit: int
    uniform: random.Random
    answer: Future[Generation] = field(default_factory=Future)
    adapter: str = "base"
    pending: list[int] = field(default_factory=list)
    """Tokens that the model has yet to see: the rest of the prompt, or the token sampled last."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class HFChatModel:
    """A Hugging Face causal language model as a :class:`train.chat.ChatModel`.

    Between calls the model is the caller's, to train as usual; while calls are in flight it is not. Whoever changes
    its weights calls ``weights_changed`` before the next call.

    Args:
        model: a decoder with full attention in every layer, or a PeftModel (LoRA) of one.
        codec: gives the end-of-turn token and decodes.
        name: what the model is called in trajectories and reports.
        max_batch: conversations that generate at the same time; further ones wait. Each has a cache of ``max_context``
            tokens, kept between its turns until another conversation needs the place.
        max_context: most tokens of prompt and completion together. A completion that reaches it is cut ("length").
        share_prefixes: whether a new conversation may start from what another one has computed. How a prefix was cut
            into forward passes shows in the last bits of the floats, so bit-equal runs do without.

    Raises:
        ConfigError: the model has layers that this engine cannot run (sliding window, linear attention).
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        codec: TokenCodec,
        *,
        name: str,
        max_batch: int,
        max_context: int,
        share_prefixes: bool = True,
    ) -> None:
        self.name = name
        self.adapter = "base"
        # A LoRA model's layers live in its base model; calling that skips PEFT's outer wrappers.
        self._model = cast(PreTrainedModel, model.get_base_model()) if isinstance(model, PeftModel) else model
        _check_attention(self._model, name)
        self._codec = codec
        self._stop = codec.eot_id  # as on a server: other tokens that end a text end no turn
        self._vocabulary: int = self._model.config.vocab_size
        self._max_context = max_context
        self._share_prefixes = share_prefixes
        self._slots = [_Slot(number * max_context) for number in range(max_batch)]
        self._cache = PackedCache(max_batch * max_context)
        self._merged: MergedLora
        self._active: dict[_Request, _Slot] = {}
        self._clock = 0
        # Shared with callers' threads, guarded by _wake:
        self._wake = threading.Condition()
        self._waiting: list[_Request] = []
        self._released: list[str] = []
        self._in_flight: set[_Request] = set()
        self._stale = True
        self._closed = False
        self._thread = threading.Thread(target=self._run, args=(torch.get_num_threads(),), name="hf-model", daemon=True)
        self._thread.start()

    async def complete(self, prompt_ids: list[int], sampling: Sampling, conversation: str) -> Generation:
        """Continue ``prompt_ids`` (see :class:`train.chat.ChatModel`).

        Raises:
            ModelFault: a prompt that is empty, too long or holds an unknown id, a failing model, a closed engine.
        """
        room = self._max_context - len(prompt_ids)
        if not prompt_ids:
            raise ModelFault(f"{self.name}: the prompt of conversation {conversation!r} is empty")
        if room < 1:
            raise ModelFault(
                f"{self.name}: a prompt of {len(prompt_ids)} tokens leaves no room in a context of "
                f"{self._max_context} tokens; shorten the prompt or raise agent.context_tokens"
            )
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < self._vocabulary:
            raise ModelFault(f"{self.name}: the prompt holds a token id outside 0..{self._vocabulary - 1}")
        if sampling.max_tokens < 1:
            raise ModelFault(f"{self.name}: max_tokens is {sampling.max_tokens}; ask for at least 1")
        request = _Request(
            list(prompt_ids), sampling, conversation, min(sampling.max_tokens, room), random.Random(sampling.seed)
        )
        with self._wake:
            if self._closed:
                raise ModelFault(f"{self.name}: the model is closed")
            self._in_flight.add(request)
            self._waiting.append(request)
            self._wake.notify()
        return await asyncio.wrap_future(request.answer)

    def release(self, conversation: str) -> None:
        with self._wake:
            self._released.append(conversation)

    def weights_changed(self, adapter: str) -> None:
        """The weights are now those of ``adapter``: every cached key and value is void.

        Raises:
            RuntimeError: completions are in flight, which would mix two policies.
        """
        with self._wake:
            running = sum(not request.answer.cancelled() for request in self._in_flight)
            if running:
                raise RuntimeError(
                    f"weights_changed({adapter!r}) while {running} completions are in flight; await them"
                )
            self._stale = True
            self.adapter = adapter

    async def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    # The rest runs in the thread.

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)  # a setting of the calling thread, not of the process
        with torch.no_grad():
            while self._await_work():
                self._serve()
        self._fail("the model was closed")
        del self._cache, self._model

    def _await_work(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._closed)
            return not self._closed

    def _serve(self) -> None:
        """Run steps until nothing is active. The last answers go out when the model is back in its own mode."""
        answers: list[tuple[_Request, Generation]] = []
        try:
            if self._stale:
                for slot in self._slots:
                    slot.held = []
                self._merged = MergedLora(self._model)
                self._stale = False
            with packed_mode(self._model), self._merged.in_place():
                self._admit()
                while self._active and not self._closed:
                    answers = self._step()
                    self._admit()
                    if self._active:
                        self._answer(answers)
        except Exception as error:
            for slot in self._slots:
                slot.held, slot.busy = [], False
            self._active.clear()
            self._fail(f"generation failed: {type(error).__name__}: {error}")
        self._answer(answers)

    def _admit(self) -> None:
        """Give slots to waiting requests, first come first served, and drop those that nobody awaits any more."""
        with self._wake:
            released, self._released = set(self._released), []
            waiting, self._waiting = self._waiting, []
            stale = self._stale  # since the last step: only requests that nobody awaits are active
        for slot in self._slots:
            if slot.conversation in released:
                slot.conversation = None
        for request in [request for request in self._active if request.answer.cancelled()]:
            self._active.pop(request).busy = False
            self._forget(request)
        kept = []
        for request in waiting:
            if request.answer.cancelled():
                self._forget(request)
            elif stale or not self._start(request):
                kept.append(request)
        with self._wake:
            self._waiting = kept + self._waiting

    def _start(self, request: _Request) -> bool:
        """Activate ``request`` if there is a slot for it and nothing worth waiting for."""
        slot = next((slot for slot in self._slots if slot.conversation == request.conversation), None)
        if slot is None:
            idle = [slot for slot in self._slots if not slot.busy]
            if not idle:
                return False
            slot = min(idle, key=lambda slot: (slot.conversation is not None, slot.used))
            shared = 0
            if self._share_prefixes:
                source = max(self._slots, key=lambda slot: _common(slot.held, request.prompt))
                shared = _common(source.held, request.prompt)
                coming = max((_common(other.prompt, request.prompt) for other in self._active), default=0)
                if coming - shared >= SHARED_PREFIX_WORTH_WAITING:
                    return False
                if source is not slot:
                    self._cache.copy(source.start, slot.start, shared)
        elif slot.busy:
            return False
        else:
            shared = _common(slot.held, request.prompt)
        shared = min(shared, len(request.prompt) - 1)  # the last token is computed anew: its logits are wanted
        slot.held = request.prompt[:shared]
        slot.conversation = request.conversation
        slot.busy = True
        request.adapter = self.adapter
        request.pending = request.prompt[shared:]
        self._active[request] = slot
        return True

    def _step(self) -> list[tuple[_Request, Generation]]:
        """One forward pass and, for every request whose tokens are all in, one sampled token. Gives what finished."""
        self._clock += 1
        device = self._model.device
        ids: list[int] = []
        places: list[int] = []
        cached: list[int] = []
        segments: list[Segment] = []
        sampled: list[_Request] = []
        last: list[int] = []
        for request, slot in sorted(self._active.items(), key=lambda item: len(item[0].pending)):
            new = request.pending[: STEP_TOKENS - len(ids)]
            if not new:
                break
            past = len(slot.held)
            segments.append(make_segment(len(ids), len(new), slot.start, past, device))
            ids += new
            places += range(past, past + len(new))
            cached += range(slot.start + past, slot.start + past + len(new))
            slot.held += new
            slot.used = self._clock
            request.pending = request.pending[len(new) :]
            if not request.pending:
                sampled.append(request)
                last.append(len(ids) - 1)
        self._cache.positions = torch.tensor(cached, device=device)
        logits = self._model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([places], device=device),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=torch.tensor(last, dtype=torch.long, device=device),
            segments=segments,
        ).logits[0]
        return self._sample(sampled, logits)

    def _sample(self, requests: Sequence[_Request], logits: torch.Tensor) -> list[tuple[_Request, Generation]]:
        if not requests:
            return []
        if not logits.isfinite().all():
            raise FloatingPointError("the logits are not finite; the weights have diverged")
        sampling = [request.sampling for request in requests]
        logprobs = sampling_logprobs(logits, sampling)
        tokens = draw(logprobs, sampling, [request.uniform.random() for request in requests])
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        finished = []
        for request, token, logprob in zip(requests, tokens.tolist(), chosen.tolist(), strict=True):
            request.tokens.append(token)
            request.logprobs.append(logprob)
            stop = token == self._stop
            if stop or len(request.tokens) == request.limit:
                self._active.pop(request).busy = False
                generation = Generation(
                    text=self._codec.decode(request.tokens),
                    token_ids=request.tokens,
                    logprobs=request.logprobs,
                    finish="stop" if stop else "length",
                    prompt_tokens=len(request.prompt),
                    adapter=request.adapter,
                )
                finished.append((request, generation))
            else:
                request.pending = [token]
        return finished

    def _answer(self, answers: list[tuple[_Request, Generation]]) -> None:
        for request, generation in answers:
            self._forget(request)
            with suppress(InvalidStateError):  # the caller was cancelled meanwhile
                request.answer.set_result(generation)
        answers.clear()

    def _fail(self, reason: str) -> None:
        """Every request in flight ends with a ModelFault; none is left waiting."""
        with self._wake:
            failed = list(self._in_flight)
            self._waiting.clear()
            self._in_flight.clear()
        for request in failed:
            with suppress(InvalidStateError):  # the caller was cancelled meanwhile
                request.answer.set_exception(ModelFault(f"{self.name}: {reason}"))

    def _forget(self, request: _Request) -> None:
        with self._wake:
            self._in_flight.discard(request)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    shortest = min(len(first), len(second))
    if first[:shortest] == second[:shortest]:
        return shortest
    return next(index for index in range(shortest) if first[index] != second[index])


def _check_attention(model: PreTrainedModel, name: str) -> None:
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if kinds or not model._supports_attention_backend:
        why = f"layers of type {', '.join(sorted(kinds))}" if kinds else "no exchangeable attention"
        raise ConfigError(f"model.name: {name!r} has {why}, which engine 'hf' cannot run; set engine: server")
