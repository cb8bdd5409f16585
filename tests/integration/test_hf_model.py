"""HFChatModel against plain full forward passes of the same model: a tiny random Llama, and SmolLM2-135M (float32)."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.tiny import tiny_tokenizer
from train import hf_model
from train.chat import Generation, ModelFault, Sampling
from train.config import ConfigError
from train.hf_model import HFChatModel
from train.merged import MergedLora
from train.tokens import TokenCodec

pytestmark = pytest.mark.integration

Turns = list[tuple[list[int], Generation]]

GREEDY = Sampling(max_tokens=8, temperature=0.0)


@pytest.fixture
def tiny(codec: TokenCodec) -> PreTrainedModel:
    """Three layers, four query heads on two key-value heads, weights so wide that the context decides what follows."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=codec.eot_id,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def codec() -> TokenCodec:
    return TokenCodec(tiny_tokenizer())


@pytest.fixture
def adapted(tiny: PreTrainedModel) -> Iterator[PeftModel]:
    """The tiny model with a LoRA adapter that does something; taken off afterwards."""
    torch.manual_seed(1)
    model = get_peft_model(tiny, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    yield model.eval()
    model.unload()


@asynccontextmanager
async def serving(
    model: PreTrainedModel | PeftModel, codec: TokenCodec, max_batch: int = 4, max_context: int = 1024
) -> AsyncIterator[HFChatModel]:
    chat = HFChatModel(model, codec, name="test-model", max_batch=max_batch, max_context=max_context)
    try:
        yield chat
    finally:
        await chat.close()


@torch.no_grad()
def next_logprobs(model: PreTrainedModel | PeftModel, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of every next token, by one plain forward pass, shape (tokens, vocabulary)."""
    return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def check_greedy(model: PreTrainedModel | PeftModel, prompt: list[int], answer: Generation, stop: int) -> None:
    """Every token is the likeliest after what precedes it: what a loop of full forward passes would have written."""
    rows = next_logprobs(model, prompt + answer.token_ids)[len(prompt) - 1 : -1]
    assert answer.token_ids == rows.argmax(-1).tolist()
    assert answer.logprobs == pytest.approx(rows.max(-1).values.tolist(), abs=1e-4)
    assert stop not in answer.token_ids[:-1]
    assert answer.finish == ("stop" if answer.token_ids[-1] == stop else "length")
    assert answer.finish == "stop" or len(answer.token_ids) == GREEDY.max_tokens
    assert answer.prompt_tokens == len(prompt)


async def talk(chat: HFChatModel, codec: TokenCodec, name: str, turns: list[str]) -> Turns:
    """An append-only conversation: every prompt extends the one before it and its completion."""
    done: Turns = []
    ids = codec.start("You play a text game.", turns[0])
    for number, turn in enumerate(turns):
        if number:
            ids = ids + codec.turn(turn, closed=done[-1][1].finish == "stop")
        answer = await chat.complete(ids, GREEDY, name)
        done.append((ids, answer))
        ids = ids + answer.token_ids
    return done


async def talk_all(chat: HFChatModel, codec: TokenCodec, games: dict[str, list[str]]) -> Turns:
    conversations = await asyncio.gather(*(talk(chat, codec, name, turns) for name, turns in games.items()))
    return list(chain.from_iterable(conversations))


def games(count: int) -> dict[str, list[str]]:
    """Conversations of different lengths and numbers of turns; every third repeats the beginning of the one before."""
    rooms = ["You see a mug 1 and a sink 1. ", "It is dark. A lamp 2 stands on desk 1. ", "A long hall. "]
    return {
        f"game{n}": [rooms[(n - (n % 3 == 2)) % 3] * (1 + n // 2), *["Nothing happens.", "You open drawer 1."][: n % 3]]
        for n in range(count)
    }


def forwards(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> list[int]:
    """The number of tokens of each forward pass of the engine from now on."""
    sizes: list[int] = []
    plain = model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        if "segments" in kwargs:
            sizes.append(kwargs["input_ids"].shape[1])
        return plain(*args, **kwargs)

    monkeypatch.setattr(model, "forward", counted)
    return sizes


def test_interleaved_conversations_equal_full_forward_passes(tiny: PreTrainedModel, codec: TokenCodec) -> None:
    async def run() -> Turns:
        async with serving(tiny, codec, max_batch=16) as chat:
            return await talk_all(chat, codec, games(16))

    answers = asyncio.run(run())
    assert len(answers) == 31
    for prompt, answer in answers:
        check_greedy(tiny, prompt, answer, codec.eot_id)
    assert len({tuple(answer.token_ids) for _, answer in answers}) > 10


def test_eviction_and_pieces_of_prompts_change_nothing(
    tiny: PreTrainedModel, codec: TokenCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three slots for sixteen conversations, and steps smaller than a prompt."""
    monkeypatch.setattr(hf_model, "STEP_TOKENS", 17)
    sizes = forwards(monkeypatch, tiny)

    async def run() -> Turns:
        async with serving(tiny, codec, max_batch=3) as chat:
            return await talk_all(chat, codec, games(16))

    for prompt, answer in asyncio.run(run()):
        check_greedy(tiny, prompt, answer, codec.eot_id)
    assert max(sizes[: len(sizes) // 2]) == 17


def test_a_turn_costs_only_what_is_new(
    tiny: PreTrainedModel, codec: TokenCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> tuple[Turns, list[int]]:
        async with serving(tiny, codec) as chat:
            sizes = forwards(monkeypatch, tiny)
            return await talk(chat, codec, "game", ["You see a mug 1. " * 9, "Nothing happens."]), sizes

    ((first, reply), (second, again)), sizes = asyncio.run(run())
    steps = len(reply.token_ids) - 1
    # The last sampled token has not been through the model, so it comes with the second prompt.
    assert sizes[: steps + 2] == [len(first), *[1] * steps, len(second) - len(first) - steps]
    assert sum(sizes) == len(second) + len(again.token_ids) - 1


def test_a_group_computes_its_first_prompt_once(
    tiny: PreTrainedModel, codec: TokenCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = codec.start(None, "You see a mug 1. " * 9)

    async def run() -> tuple[list[Generation], list[int]]:
        async with serving(tiny, codec, max_batch=8) as chat:
            sizes = forwards(monkeypatch, tiny)
            return await asyncio.gather(*(chat.complete(prompt, GREEDY, f"rollout{n}") for n in range(8))), sizes

    answers, sizes = asyncio.run(run())
    for answer in answers:
        check_greedy(tiny, prompt, answer, codec.eot_id)
    # One prefill; the other seven compute the last token alone, beside the first one's second token.
    assert sizes[:2] == [len(prompt), 8]


def test_rewritten_prompts_reuse_only_what_agrees(tiny: PreTrainedModel, codec: TokenCodec) -> None:
    """A conversation that drops its oldest turns, or shrinks to a prefix of what was cached."""

    async def run() -> Turns:
        async with serving(tiny, codec) as chat:
            done = await talk(chat, codec, "game", ["You see a mug 1.", "Nothing happens.", "You open drawer 1."])
            prompts = [done[2][0][:40] + done[2][0][60:], done[2][0][:30], done[2][0]]
            return [(prompt, await chat.complete(prompt, GREEDY, "game")) for prompt in prompts]

    for prompt, answer in asyncio.run(run()):
        check_greedy(tiny, prompt, answer, codec.eot_id)


def test_changed_weights_void_the_caches(adapted: PeftModel, codec: TokenCodec) -> None:
    async def run() -> None:
        async with serving(adapted, codec) as chat:
            prompt = codec.start(None, "You see a mug 1.")
            before = await chat.complete(prompt, GREEDY, "game")
            assert before.adapter == "base"
            check_greedy(adapted, prompt, before, codec.eot_id)
            with torch.no_grad():
                for name, weight in adapted.named_parameters():
                    if "lora_B" in name:
                        weight.mul_(-2)
            chat.weights_changed("policy-v0001")
            assert chat.adapter == "policy-v0001"
            longer = prompt + before.token_ids + codec.turn("Nothing happens.", closed=before.finish == "stop")
            after = await chat.complete(longer, GREEDY, "game")
            assert after.adapter == "policy-v0001"
            check_greedy(adapted, longer, after, codec.eot_id)

    asyncio.run(run())


def test_training_between_rollouts_works_and_finds_the_model_as_it_was(adapted: PeftModel, codec: TokenCodec) -> None:
    async def run() -> None:
        async with serving(adapted, codec) as chat:
            prompt = codec.start(None, "You see a mug 1.")
            adapted.train()
            weights = {name: weight.clone() for name, weight in adapted.named_parameters()}
            answer = await chat.complete(prompt, GREEDY, "game")
            assert adapted.training
            assert adapted.config._attn_implementation == "sdpa"
            assert not any(module.merged for module in adapted.modules() if isinstance(module, LoraLayer))
            for name, weight in adapted.named_parameters():
                assert torch.equal(weight, weights[name])
            ids = torch.tensor([prompt + answer.token_ids])
            loss = adapted(input_ids=ids, labels=ids).loss
            loss.backward()
            gradients = [weight.grad.abs().sum() for weight in adapted.parameters() if weight.requires_grad]
            assert gradients
            assert all(gradient > 0 for gradient in gradients)
            adapted.eval()
            check_greedy(adapted, prompt, answer, codec.eot_id)

    asyncio.run(run())


def test_adapters_are_merged_in_float32_only(adapted: PeftModel) -> None:
    ids = torch.tensor([[256, 65, 66, 67]])
    layers = [module for module in adapted.modules() if isinstance(module, LoraLayer)]
    with torch.no_grad():
        unmerged = adapted(ids).logits
        merged = MergedLora(adapted)
        assert not any(layer.merged for layer in layers)
        with merged.in_place():
            assert all(layer.merged for layer in layers)
            assert torch.allclose(adapted(ids).logits, unmerged, atol=1e-4)
        assert torch.equal(adapted(ids).logits, unmerged)
        with adapted.disable_adapter():
            base = adapted(ids).logits
            with MergedLora(adapted).in_place():
                assert torch.equal(adapted(ids).logits, base)
        assert not torch.allclose(base, unmerged, atol=1e-2)
        for parameter in adapted.parameters():
            parameter.data = parameter.data.bfloat16()
        with MergedLora(adapted).in_place():
            assert not any(layer.merged for layer in layers)


def test_weights_may_not_change_under_a_running_completion(tiny: PreTrainedModel, codec: TokenCodec) -> None:
    async def run() -> None:
        async with serving(tiny, codec) as chat:
            running = asyncio.create_task(chat.complete([1, 2, 3], Sampling(200, seed=3), "game"))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="1 completions are in flight"):
                chat.weights_changed("policy-v0001")
            await running
            chat.weights_changed("policy-v0001")

    asyncio.run(run())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(12, temperature=1.0, seed=5),
        Sampling(12, temperature=0.7, top_k=5, seed=6),
        Sampling(12, temperature=1.3, top_p=0.6, seed=7),
    ],
)
def test_a_sample_depends_on_its_seed_alone(tiny: PreTrainedModel, codec: TokenCodec, sampling: Sampling) -> None:
    prompt = codec.start(None, "You see a mug 1.")
    other = Sampling(sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k, seed=99)

    async def run() -> list[Generation]:
        async with serving(tiny, codec, max_batch=6) as chat:
            alone = await chat.complete(prompt, sampling, "alone")
            different = await chat.complete(prompt, other, "different")
            noise = [chat.complete(codec.start(None, "x" * n), other, f"noise{n}") for n in range(1, 6)]
            crowded, *_ = await asyncio.gather(chat.complete(prompt, sampling, "crowded"), *noise)
            return [alone, crowded, different]

    alone, crowded, different = asyncio.run(run())
    assert crowded.token_ids == alone.token_ids
    assert crowded.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert different.token_ids != alone.token_ids
    # The log-probabilities are those of the distribution that was sampled from.
    rows = next_logprobs(tiny, prompt + alone.token_ids)[len(prompt) - 1 : -1] / sampling.temperature
    for row, token, logprob in zip(rows, alone.token_ids, alone.logprobs, strict=True):
        probabilities = row.softmax(0).sort(descending=True)
        kept = sampling.top_k or int((probabilities.values.cumsum(0) < sampling.top_p).sum()) + 1
        assert token in probabilities.indices[:kept]
        expected = row.softmax(0)[token] / probabilities.values[:kept].sum()
        assert logprob == pytest.approx(float(expected.log()), abs=1e-4)


def test_limits_of_the_context(tiny: PreTrainedModel, codec: TokenCodec) -> None:
    async def run() -> None:
        async with serving(tiny, codec, max_context=20) as chat:
            answer = await chat.complete([5] * 18, Sampling(50, temperature=0.0), "full")
            assert answer.finish == "length"
            assert len(answer.token_ids) == 2
            with pytest.raises(ModelFault, match=r"prompt of 20 tokens .* context of 20 tokens"):
                await chat.complete([5] * 20, GREEDY, "full")
            with pytest.raises(ModelFault, match=r"outside 0\.\.258"):
                await chat.complete([259], GREEDY, "full")
            with pytest.raises(ModelFault, match="is empty"):
                await chat.complete([], GREEDY, "full")

    asyncio.run(run())


def test_a_failing_model_fails_its_callers_and_recovers(
    tiny: PreTrainedModel, codec: TokenCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = codec.start(None, "You see a mug 1.")

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    async def run() -> Generation:
        async with serving(tiny, codec, max_batch=2) as chat:
            await chat.complete(prompt, GREEDY, "game0")
            with monkeypatch.context() as patch:
                patch.setattr(tiny.model, "forward", broken)
                calls = (chat.complete([*prompt, 65], GREEDY, f"game{n}") for n in range(5))
                results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
            assert [type(result) for result in results] == [ModelFault] * 5
            assert "out of memory" in str(results[4])
            assert tiny.config._attn_implementation == "sdpa"
            return await chat.complete(prompt, GREEDY, "game0")

    check_greedy(tiny, prompt, asyncio.run(run()), codec.eot_id)


def test_diverged_weights_are_a_fault(
    tiny: PreTrainedModel, codec: TokenCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with serving(tiny, codec) as chat:
            with torch.no_grad():
                monkeypatch.setattr(tiny.model.norm, "weight", torch.nn.Parameter(torch.full((32,), torch.nan)))
            with pytest.raises(ModelFault, match="not finite"):
                await chat.complete([65], GREEDY, "game")

    asyncio.run(run())


def test_two_requests_of_one_conversation_take_turns(tiny: PreTrainedModel, codec: TokenCodec) -> None:
    prompts = [codec.start(None, text) for text in ("You see a mug 1.", "You see a mug 2.", "A hall.")]

    async def run() -> list[Generation]:
        async with serving(tiny, codec) as chat:
            return await asyncio.gather(*(chat.complete(prompt, GREEDY, "game") for prompt in prompts))

    for prompt, answer in zip(prompts, asyncio.run(run()), strict=True):
        check_greedy(tiny, prompt, answer, codec.eot_id)


def test_cancelled_callers_free_their_place_and_close_ends_the_rest(tiny: PreTrainedModel, codec: TokenCodec) -> None:
    endless_model = copy.deepcopy(tiny)
    with torch.no_grad():
        endless_model.get_output_embeddings().weight[codec.eot_id] = 0.0  # among 258 others it is never the largest

    async def run() -> None:
        async with serving(endless_model, codec, max_batch=1) as chat:
            endless = Sampling(900, temperature=1.0, top_k=1)
            running = asyncio.create_task(chat.complete([65] * 9, endless, "endless"))
            await asyncio.sleep(0.05)
            running.cancel()
            assert (await asyncio.wait_for(chat.complete([66] * 9, GREEDY, "next"), 30)).token_ids
            running = asyncio.create_task(chat.complete([65] * 9, endless, "endless"))
            await asyncio.sleep(0.05)
            chat.release("endless")
            await chat.close()
            with pytest.raises(ModelFault, match="closed"):
                await running
            with pytest.raises(ModelFault, match="closed"):
                await chat.complete([65], GREEDY, "late")

    asyncio.run(run())


def test_random_traffic(tiny: PreTrainedModel, codec: TokenCodec) -> None:
    """Prompts that share, extend and cut each other's beginnings, from conversations that come and go."""
    dice = random.Random(0)
    pool = [[dice.randrange(256) for _ in range(60)] for _ in range(3)]

    async def player(chat: HFChatModel, number: int) -> Turns:
        done: Turns = []
        for turn in range(4):
            prompt = dice.choice(pool)[: dice.randrange(1, 60)] + pool[number % 3][: dice.randrange(9)]
            done.append((prompt, await chat.complete(prompt, GREEDY, f"player{number}")))
            if turn == 2:
                chat.release(f"player{number}")
        return done

    async def run() -> Turns:
        async with serving(tiny, codec, max_batch=5) as chat:
            played = await asyncio.gather(*(player(chat, number) for number in range(12)))
            return list(chain.from_iterable(played))

    for prompt, answer in asyncio.run(run()):
        check_greedy(tiny, prompt, answer, codec.eot_id)


def test_a_model_with_other_attention_is_refused(codec: TokenCodec) -> None:
    config = Qwen2Config(
        vocab_size=259,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_sliding_window=True,
        max_window_layers=1,
    )
    with pytest.raises(ConfigError, match=r"sliding_attention.*engine: server"):
        HFChatModel(Qwen2ForCausalLM(config), codec, name="windowed", max_batch=1, max_context=32)


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> tuple[PreTrainedModel, TokenCodec]:
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    return model, TokenCodec(AutoTokenizer.from_pretrained(smollm2_folder))


def test_smollm2_with_an_adapter_equals_full_forward_passes(smollm2: tuple[PreTrainedModel, TokenCodec]) -> None:
    """Thirty real layers, few slots, an adapter that changes between two rounds of conversations."""
    base, codec = smollm2
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear"))

    async def run() -> None:
        async with serving(model, codec, max_batch=2) as chat:
            for version in ("base", "policy-v0001"):
                if version != "base":
                    with torch.no_grad():
                        for name, weight in model.named_parameters():
                            if "lora_B" in name:
                                weight.normal_(std=0.2)
                    chat.weights_changed(version)
                answers = await talk_all(chat, codec, games(3))
                for prompt, answer in answers:
                    assert answer.adapter == version
                    check_greedy(model, prompt, answer, codec.eot_id)
                texts.append([answer.text for _, answer in answers])

    texts: list[list[str]] = []
    asyncio.run(run())
    assert texts[0] != texts[1]
    model.unload()
