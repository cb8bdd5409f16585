"""Training a real small language model (SmolLM2-135M, float32): warm start, then GRPO on what it sampled itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from train.adapters import load_adapter, new_adapter, save_adapter
from train.chat import Generation, Sampling
from train.config import GrpoConfig, LoraConfig, ModelConfig, WarmStartConfig
from train.grpo import EpisodeGRPOTrainer, make_batch
from train.hf_model import HFChatModel
from train.load import load_policy
from train.rows import rows_of
from train.sft import train_sft
from train.tokens import TokenCodec
from train.trajectory import Context, Episode, Span, Step

pytestmark = pytest.mark.integration

ANSWERS = ["go to shelf 1", "take mug 1 from shelf 1", "go to sinkbasin 1", "open fridge 1"]


@pytest.fixture(scope="module")
def policy(smollm2_folder: Path) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    model, tokenizer = load_policy(ModelConfig(name=str(smollm2_folder), dtype="float32"))
    return new_adapter(model, LoraConfig(rank=8, alpha=16), seed=0), tokenizer


def episode(prompt: list[int], completion: list[int], logprobs: list[float] | None, reward: float) -> Episode:
    span = Span(start=len(prompt), end=len(prompt) + len(completion), step=0, logprobs=logprobs)
    return Episode(
        id=str(completion),
        phase="test",
        env="household",
        task="easy/1",
        task_type="pick",
        seed=0,
        steps=[Step(index=0, observation="", text="", action="x", reward=reward)],
        contexts=[Context(ids=prompt + completion, spans=[span])],
    )


def prompt_of(codec: TokenCodec) -> list[int]:
    return codec.start("You act in a household.", "You see a shelf 1 and a fridge 1. What do you do?")


@pytest.mark.timeout(900)  # forty seconds of one slow core
def test_warm_start_then_an_update_on_own_samples(
    policy: tuple[PeftModel, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    model, tokenizer = policy
    codec = TokenCodec(tokenizer)
    prompt = prompt_of(codec)
    rows = [
        row
        for answer in ANSWERS * 2
        for row in rows_of(episode(prompt, codec.reply(f"Action: {answer}"), None, reward=1.0))
    ]
    config = WarmStartConfig(tasks="household/easy/train:0-7", epochs=2, learning_rate=2e-3, tokens_per_batch=256)
    result = train_sft(model, tokenizer, rows, config, seed=0, out_dir=tmp_path / "sft", log=lambda step, metrics: None)
    assert len(rows) == 8
    assert result["steps"] == 4  # two epochs of two steps: eight rows of 64 padded tokens, 256 a step
    assert result["loss"] < 0.7 * result["first_loss"]

    trainer = EpisodeGRPOTrainer(
        model, tokenizer, GrpoConfig(tasks="household/easy/train:0-7", temperature=0.7), tmp_path / "grpo", seed=0
    )
    sampled = asyncio.run(_sample(model, codec, prompt))
    assert len({tuple(answer.token_ids) for answer in sampled}) > 1
    group = [
        episode(prompt, answer.token_ids, answer.logprobs, reward=float(i == 0)) for i, answer in enumerate(sampled)
    ]
    metrics = trainer.update(make_batch([group], trainer.settings, episode_tokens=12))
    # The sampler and the trainer see the same tokens through the same weights at the same temperature.
    assert metrics["sampler_max_difference"] < 1e-3
    assert metrics["trained_tokens"] == sum(len(answer.token_ids) for answer in sampled)
    assert metrics["grad_norm"] > 0

    save_adapter(model, tmp_path / "adapter", "HuggingFaceTB/SmolLM2-135M-Instruct")
    base, _ = load_policy(ModelConfig(dtype="float32"))
    again = load_adapter(base, tmp_path / "adapter", trainable=False)
    assert asyncio.run(_greedy(again, codec, prompt)) == asyncio.run(_greedy(model, codec, prompt))


async def _sample(model: PeftModel, codec: TokenCodec, prompt: list[int]) -> list[Generation]:
    chat = HFChatModel(model, codec, name="policy", max_batch=4, max_context=512)
    calls = [chat.complete(prompt, Sampling(max_tokens=12, temperature=0.7, seed=i), str(i)) for i in range(4)]
    answers = await asyncio.gather(*calls)
    await chat.close()
    return answers


async def _greedy(model: PeftModel, codec: TokenCodec, prompt: list[int]) -> list[int]:
    chat = HFChatModel(model, codec, name="policy", max_batch=1, max_context=512)
    answer = await chat.complete(prompt, Sampling(max_tokens=8, temperature=0.0), "greedy")
    await chat.close()
    return answer.token_ids
