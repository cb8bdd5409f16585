"""The real vLLM server against the same weights in process (fp32)."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from train.adapters import new_adapter, save_adapter
from train.chat import ModelFault, Sampling
from train.config import ConfigError, LoraConfig
from train.server_model import ServerModel
from train.tokens import TokenCodec
from train.vllm_server import VLLMServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]  # the first test waits for the server's start

GREEDY = Sampling(max_tokens=16, temperature=0.0)
T = TypeVar("T")


@pytest.fixture(scope="module")
def codec(smollm2_folder: Path) -> TokenCodec:
    return TokenCodec(AutoTokenizer.from_pretrained(smollm2_folder))


@pytest.fixture(scope="module")
def base(smollm2_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(codec: TokenCodec) -> list[list[int]]:
    first = codec.start(None, "What is the capital of France?")
    cut = codec.text("The capital of")
    return [
        first,
        # A completion that the length limit cut, in the middle of the conversation.
        first + cut + codec.turn("Go on. <|im_end|> <repo_name>", closed=False),
        # Ids that no tokenizer would give for this text: "kitchen" letter by letter.
        codec.start("You are in a house.", "Where are you?") + [i for letter in "kitchen" for i in codec.text(letter)],
    ]


def served(server: VLLMServer, codec: TokenCodec | None, use: Callable[[ServerModel], Awaitable[T]]) -> T:
    async def run() -> T:
        model = ServerModel([server.url], server.name, codec)
        try:
            return await use(model)
        finally:
            await model.close()

    return asyncio.run(run())


@torch.no_grad()
def greedy(model: Any, prompt: list[int], eot: int, count: int) -> tuple[list[int], list[float]]:
    """Greedy ids of ``transformers`` and the log-probability of each under the temperature-1 distribution."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=eot,
        pad_token_id=eot,
    )
    new = out[0, len(prompt) :].tolist()
    return new, logprobs_of(model, prompt, new)


@torch.no_grad()
def logprobs_of(model: Any, prompt: list[int], new: list[int], temperature: float = 1.0) -> list[float]:
    logits = model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1].float() / temperature
    logprobs: list[float] = logits.log_softmax(-1)[range(len(new)), new].tolist()
    return logprobs


def test_greedy_ids_and_log_probabilities_equal_transformers(
    vllm_server: VLLMServer, codec: TokenCodec, prompts: list[list[int]], base: Any
) -> None:
    async def use(model: ServerModel) -> list[Any]:
        await model.check()
        return await asyncio.gather(*(model.complete(ids, GREEDY, str(i)) for i, ids in enumerate(prompts)))

    for prompt, generation in zip(prompts, served(vllm_server, codec, use), strict=True):
        ids, logprobs = greedy(base, prompt, codec.eot_id, GREEDY.max_tokens)
        assert generation.token_ids == ids
        assert generation.logprobs == pytest.approx(logprobs, abs=2e-3)
        assert generation.finish == ("stop" if ids[-1] == codec.eot_id else "length")
        assert generation.text == codec.decode(ids)
        assert (generation.prompt_tokens, generation.adapter) == (len(prompt), "base")


def test_a_finished_answer_ends_with_the_end_of_turn_token(vllm_server: VLLMServer, codec: TokenCodec) -> None:
    prompt = codec.start(None, "What is the capital of France?")
    generation = served(vllm_server, codec, lambda model: model.complete(prompt, Sampling(64, temperature=0.0), "a"))
    assert generation.finish == "stop"
    assert generation.token_ids[-1] == codec.eot_id
    assert generation.token_ids.count(codec.eot_id) == 1
    assert len(generation.logprobs) == len(generation.token_ids)


def test_sampled_log_probabilities_are_those_of_the_sampling_distribution(
    vllm_server: VLLMServer, codec: TokenCodec, prompts: list[list[int]], base: Any
) -> None:
    sampling = Sampling(max_tokens=12, temperature=0.7, seed=5)

    async def use(model: ServerModel) -> tuple[Any, Any, Any]:
        alone = await model.complete(prompts[0], sampling, "a")
        crowd = [model.complete(ids, Sampling(8, seed=i), f"b{i}") for i, ids in enumerate(prompts)]
        among, *_ = await asyncio.gather(model.complete(prompts[0], sampling, "c"), *crowd)
        other = await model.complete(prompts[0], Sampling(max_tokens=12, temperature=0.7, seed=6), "a")
        return alone, among, other

    alone, among, other = served(vllm_server, codec, use)
    assert alone.logprobs == pytest.approx(logprobs_of(base, prompts[0], alone.token_ids, 0.7), abs=2e-3)
    assert among.token_ids == alone.token_ids  # the seed, not the batch, decides
    assert other.token_ids != alone.token_ids


def random_adapter(base: Any, folder: Path, seed: int, rank: int = 8) -> Any:
    """Save a LoRA that changes what ``base`` says into ``folder``; returns the adapted model."""
    config = LoraConfig.model_validate({"rank": rank, "alpha": 2 * rank})
    model = new_adapter(copy.deepcopy(base), config, seed)
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    save_adapter(model, folder, "SmolLM2-135M-Instruct")
    return model


def test_adapter_versions_come_and_go(
    vllm_server: VLLMServer, codec: TokenCodec, prompts: list[list[int]], base: Any, tmp_path: Path
) -> None:
    folders = [tmp_path / f"policy-v000{i}" for i in (1, 2)]
    adapted = [random_adapter(base, folder, seed) for seed, folder in enumerate(folders)]
    listed: list[list[str]] = []

    async def names() -> list[str]:
        async with httpx.AsyncClient() as client:
            data = (await client.get(f"{vllm_server.url}/v1/models")).json()["data"]
        return [card["id"].rsplit("-", 1)[0] for card in data if card["id"] != "smollm2"]

    async def use(model: ServerModel) -> list[Any]:
        before = await model.complete(prompts[0], GREEDY, "before")
        await model.load_adapter(folders[0], "policy-v0001")
        first = await model.complete(prompts[0], GREEDY, "first")
        running = asyncio.create_task(model.complete(prompts[1], Sampling(64, temperature=0.0), "first"))
        await asyncio.sleep(0.05)
        await model.load_adapter(folders[1], "policy-v0002")
        second = await model.complete(prompts[0], GREEDY, "second")
        late = await running
        listed.append(await names())
        model.release("first")
        await model.load_adapter(folders[1], "policy-v0002")  # waits until the old one is unloaded
        listed.append(await names())
        await model.close()
        listed.append(await names())
        return [before, first, second, late]

    before, first, second, late = served(vllm_server, codec, use)
    assert [g.adapter for g in (before, first, second, late)] == [
        "base",
        "policy-v0001",
        "policy-v0002",
        "policy-v0001",
    ]
    assert listed == [["policy-v0001", "policy-v0002"], ["policy-v0002"], []]
    for model, generation in zip(adapted, (first, second), strict=True):
        ids, logprobs = greedy(model, prompts[0], codec.eot_id, GREEDY.max_tokens)
        assert generation.token_ids == ids
        assert generation.logprobs == pytest.approx(logprobs, abs=2e-3)
    sums = sorted(sum(generation.logprobs) for generation in (before, first, second))
    assert min(sums[1] - sums[0], sums[2] - sums[1]) > 0.1  # the three differ by more than they may from PEFT's


def test_a_server_that_lost_the_adapter_gets_it_again(
    vllm_server: VLLMServer, codec: TokenCodec, prompts: list[list[int]], base: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "policy-v0001"
    random_adapter(base, folder, seed=0)

    async def use(model: ServerModel) -> tuple[Any, Any]:
        await model.load_adapter(folder, "policy-v0001")
        before = await model.complete(prompts[0], GREEDY, "a")
        async with httpx.AsyncClient() as client:  # as a restart would
            (name,) = (
                card["id"]
                for card in (await client.get(f"{vllm_server.url}/v1/models")).json()["data"]
                if card["id"] != "smollm2"
            )
            gone = await client.post(f"{vllm_server.url}/v1/unload_lora_adapter", json={"lora_name": name})
            assert gone.is_success
        return before, await model.complete(prompts[0], GREEDY, "a")

    before, after = served(vllm_server, codec, use)
    assert (after.token_ids, after.adapter) == (before.token_ids, "policy-v0001")


def test_an_adapter_that_the_server_refuses_leaves_the_old_one_in_use(
    vllm_server: VLLMServer, codec: TokenCodec, base: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "wide"
    random_adapter(base, folder, seed=3, rank=64)

    async def use(model: ServerModel) -> str:
        with pytest.raises(ConfigError, match=r"refuses the adapter .*64"):
            await model.load_adapter(folder, "policy-v0003")
        generation = await model.complete(codec.start(None, "Hello"), GREEDY, "a")
        return model.adapter + generation.adapter

    assert served(vllm_server, codec, use) == "basebase"


def test_errors_name_what_is_served_and_what_does_not_fit(vllm_server: VLLMServer, codec: TokenCodec) -> None:
    async def use(model: ServerModel) -> None:
        await model.check(4096, 2)
        with pytest.raises(ConfigError, match=r"agent.context_tokens: 4097, .* at most 4096 tokens"):
            await model.check(4097)
        with pytest.raises(ConfigError, match=r"holds 2 adapters in a batch, but grpo\.staleness 2 needs 3"):
            await model.check(4096, 3)
        with pytest.raises(ModelFault, match=r"HTTP 400: .*4096"):
            await model.complete([5] * 4095, GREEDY, "a")
        other = ServerModel([vllm_server.url], "qwen", codec)
        for call in (other.check(), other.complete([5], GREEDY, "a")):
            with pytest.raises((ConfigError, ModelFault), match=r"does not serve 'qwen' \(it serves 'smollm2'"):
                await call
        await other.close()

    served(vllm_server, codec, use)


def test_chat_by_messages_equals_the_ids_of_the_same_conversation(vllm_server: VLLMServer, codec: TokenCodec) -> None:
    async def use(model: ServerModel) -> tuple[str, str]:
        by_ids = await model.complete(codec.start("Be brief.", "Say hello."), GREEDY, "a")
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]
        return by_ids.text, (await model.chat(messages, GREEDY)).text

    by_ids, by_messages = served(vllm_server, codec, use)
    assert by_messages == by_ids
