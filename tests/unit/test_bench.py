"""The parts of the benchmark scripts that their verdicts rest on; the launchers with a stand-in for Python."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from envs.base import StepResult
from tests.tiny import tiny_tokenizer
from tests.tiny_policy import tiny_base
from train.adapters import new_adapter
from train.agent import start_conversation
from train.chat import Generation
from train.config import AgentConfig, ConfigError, LoraConfig, load_config, save_config
from train.rows import rows_of
from train.tokens import TokenCodec
from train.trajectory import Context, Episode, Span, Step

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "scripts" / "bench"


def script(name: str) -> ModuleType:
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCH))


def episode(number: int, contexts: list[Context]) -> Episode:
    steps = [Step(index=i, observation="", text="", reward=0.5) for i in range(2)]
    return Episode(
        id=str(number),
        phase="p",
        env="household",
        task="hard/0",
        task_type="t",
        seed=0,
        steps=steps,
        contexts=contexts,
        episode_return=1.0,
    )


# ---- update.py


def test_a_row_a_step_holds_the_whole_prompt_and_trains_the_same_tokens() -> None:
    update = script("update")
    spans = [
        Span(start=2, end=4, step=0, logprobs=[-1.0, -2.0]),
        Span(start=6, end=7, step=1, logprobs=[-3.0]),
    ]
    merged = episode(0, [Context(ids=[10, 11, 12, 13, 14, 15, 16], spans=spans)])
    cut = merged.model_copy(update={"contexts": update.a_context_a_step(merged.contexts)})
    assert [row.ids for row in rows_of(cut)] == [[10, 11, 12, 13], [10, 11, 12, 13, 14, 15, 16]]
    assert [[row.ids[i] for i, trained in enumerate(row.trained) if trained] for row in rows_of(cut)] == [
        [12, 13],
        [16],
    ]
    assert sum(row.trained_tokens for row in rows_of(merged)) == 3


def test_an_episode_under_last_turns_has_the_prompts_that_the_agent_would_build() -> None:
    update, codec = script("update"), TokenCodec(tiny_tokenizer())
    agent = AgentConfig(context_tokens=2048)
    conversation, steps = start_conversation(codec, "household", agent), []
    for index, (seen, said) in enumerate((("A room.", "look"), ("A shelf.", "go"), ("A mug.", "take"), ("Done.", "x"))):
        conversation.user(seen)
        ids = codec.reply(f"Action: {said}")
        cut = index == 2  # by length: no token ends this turn
        conversation.reply(
            Generation(said, ids[:-1] if cut else ids, [-1.0] * (len(ids) - cut), "length" if cut else "stop"), index
        )
        steps.append(Step(index=index, observation=seen, text=said))
    played = episode(0, conversation.contexts).model_copy(update={"steps": steps})
    assert update.with_last_turns(played, codec, agent) == played.contexts
    [*_, last] = update.with_last_turns(played, codec, agent.model_copy(update={"last_turns": 1}))
    text = tiny_tokenizer().decode(last.ids, skip_special_tokens=False)
    assert text.partition("A room.")[2] == (
        "\n[2 turns left out]\nA mug.<|im_end|>\n<|im_start|>assistant\nAction: take<|im_end|>\n"
        "<|im_start|>user\nDone.<|im_end|>\n<|im_start|>assistant\nAction: x<|im_end|>"
    )
    rows = rows_of(played.model_copy(update={"contexts": update.with_last_turns(played, codec, agent)}))
    assert [row.trained_tokens for row in rows] == [13 + 11 + 12 + 10]  # "Action: look" and the end of turn, ...
    agent = agent.model_copy(update={"last_turns": 1})
    rows = rows_of(played.model_copy(update={"contexts": update.with_last_turns(played, codec, agent)}))
    assert [row.trained_tokens for row in rows] == [13, 11, 12, 10]


def test_every_other_rollout_of_a_group_gets_a_return_of_one_at_its_last_step() -> None:
    groups = script("update").with_hand_set_returns([episode(i, []) for i in range(4)], 2)
    assert [[item.id for item in group] for group in groups] == [["0", "1"], ["2", "3"]]
    assert [[item.episode_return for item in group] for group in groups] == [[0.0, 1.0], [0.0, 1.0]]
    assert [step.reward for step in groups[0][0].steps] == [0.0, 0.0]
    assert [step.reward for step in groups[1][1].steps] == [0.0, 1.0]


def test_trl_takes_the_template_and_every_reply_is_a_call() -> None:
    from transformers.utils.chat_parsing import parse_response
    from trl.chat_template_utils import supports_tool_calling

    update = script("update")
    tokenizer = script("gpu_update").word_tokenizer()
    tokenizer.chat_template = update.CHAT_TEMPLATE
    assert supports_tool_calling(tokenizer)
    messages = [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "A room."},
        {"role": "assistant", "content": "Action: look"},
        {"role": "tool", "name": "act", "content": "A shelf."},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nPlay.<|im_end|>\n<|im_start|>user\nA room.<|im_end|>\n"
        "<|im_start|>assistant\nAction: look<|im_end|>\n<|im_start|>user\nA shelf.<|im_end|>\n<|im_start|>assistant\n"
    )
    for reply, text in (("Action: look<|im_end|>", "Action: look"), ("no end", "no end")):
        parsed = parse_response(reply, update.RESPONSE_TEMPLATE, prefix="<|im_start|>assistant\n")
        call = {"type": "function", "function": {"name": "act", "arguments": {"reply": text}}}
        assert parsed == {"role": "assistant", "tool_calls": [call]}


@pytest.mark.parametrize(("merged_seconds", "code"), [(4.0, 0), (4.1, 1)])
def test_the_goal_of_merged_rows_decides_the_exit_code(
    merged_seconds: float, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    common = {"tokens": 9, "trained_tokens": 3, "padding_share": 0.0, "cpu": 1.0, "gib": 1.0, "grad_norm": 0.5}
    results = {
        "step rows": common | {"rows": 30, "seconds": 10.0},
        "merged rows": common | {"rows": 2, "seconds": merged_seconds},
    }
    assert script("update").report(results) == code
    assert ("MISSED" in capsys.readouterr().out) == bool(code)


# ---- learning.py


def test_an_arm_that_was_run_with_other_settings_is_an_error_that_names_them(tmp_path: Path) -> None:
    learning = script("learning")
    run = tmp_path / "elsewhere/learning-household-warm"
    run.mkdir(parents=True)
    settings = learning.settings_of("household", "warm", tmp_path, ["grpo=null", "run.seed=1"])
    save_config(load_config(ROOT / "configs/learning-household.yaml", settings), run / "config.yaml")
    (run / "result.json").write_text("{}")
    learning.run_arm("household", "warm", run.parent, ["run.seed=1"])  # nothing is run: it would fail in a test
    with pytest.raises(
        ConfigError, match=r"learning-household-warm was run with other settings \(agent\.thoughts, run\.seed\); give"
    ):
        learning.run_arm("household", "warm", run.parent, ["run.seed=2", "agent.thoughts=true"])


def test_arms_without_a_gain_are_named() -> None:
    differences = {"grpo": [0.05, 0.01, 0.09], "gigpo": [0.03, -0.01, 0.08], "third": [0.02, 0.0, 0.04]}
    assert script("learning").without_gain(differences) == ["gigpo", "third"]
    assert script("learning").without_gain({"grpo": [0.05, 0.01, 0.09]}) == []


@pytest.mark.parametrize(("lost", "code", "named"), [(0, 0, False), (1, 1, True)])
def test_every_arm_must_gain(
    lost: int,
    code: int,
    named: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of 40 games the warm start wins none, GRPO all, GiGPO all or ``lost``."""
    learning = script("learning")
    monkeypatch.setattr(learning, "draw", lambda *_: None)
    won = {"warm": 0, "grpo": 40, "gigpo": 0 if lost else 40}
    for arm, count in won.items():
        run = tmp_path / f"learning-household-{arm}"
        (run / "evals").mkdir(parents=True)
        (run / "metrics.jsonl").write_text('{"step": 1, "phase": "grpo-0001", "steps": 2.5, "episodes": 4}\n')
        items = [{"id": str(game), "won": game < count} for game in range(40)]
        metrics = {"items": 40, "success": count / 40, "success_interval": [0.0, 1.0], "invalid_rate": 0.0}
        result = {"items": items, "metrics": metrics, "adapter_hash": "a", "manifest_hash": "m"}
        (run / f"evals/eval-{'warm' if arm == 'warm' else 'final'}.json").write_text(json.dumps(result))
    assert learning.report("household", tmp_path, ["warm", "grpo", "gigpo"]) == code
    printed = capsys.readouterr().out
    assert ("warm start + GiGPO: the interval of the difference is not above zero\n" in printed) == named
    assert "warm start + GRPO: the interval" not in printed
    rows = json.loads((tmp_path / "learning-household/result.json").read_text())
    assert rows["grpo"]["difference"] == [1.0, 1.0, 1.0]
    assert rows["grpo"]["env_steps"] == 10


# ---- kv_cache.py


@pytest.mark.parametrize(("cpu", "same", "code"), [(10.0, True, 0), (10.1, True, 1), (5.0, False, 1)])
def test_keeping_must_pay_and_change_no_action(
    cpu: float, same: bool, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"steps": 4, "prompts": 100, "generated": 20, "actions": [["a", "b"], ["c", "d"]]}
    results = {
        "nothing": row | {"seconds": 20.0, "cpu": 10.0, "computed": 120},
        "episodes": row | {"seconds": 5.0, "cpu": 2.0, "computed": 60},
        "all": row | {"seconds": 4.0, "cpu": cpu, "computed": 30, "actions": row["actions"] if same else [["a"]]},
    }
    assert script("kv_cache").report(results) == code
    printed = capsys.readouterr().out
    assert "episodes / nothing: tokens computed 0.50x, seconds 0.25x, cpu seconds 0.20x, actions equal\n" in printed


def test_tokens_that_go_through_the_model_are_counted() -> None:
    model = new_adapter(tiny_base(), LoraConfig(rank=8), seed=0)
    counter = script("kv_cache").Counter(model)
    model.get_base_model()(input_ids=torch.tensor([[1, 5, 9, 4, 7]]))
    model.get_base_model()(input_ids=torch.tensor([[1, 5]]))
    assert counter.tokens == 7


# ---- rollout.py


def test_at_the_barrier_nobody_goes_on_before_the_slowest_and_leavers_are_not_waited_for() -> None:
    order: list[str] = []

    async def party(name: str, rounds: int, barrier: Any) -> None:
        for number in range(rounds):
            for _ in range(3 if name == "slow" else 0):
                await asyncio.sleep(0)
            order.append(f"{name} {number}")
            await barrier.wait()
        barrier.leave()

    async def play() -> None:
        barrier = script("rollout").Barrier(2)
        await asyncio.wait_for(asyncio.gather(party("fast", 4, barrier), party("slow", 2, barrier)), timeout=10)

    asyncio.run(play())
    assert order == ["fast 0", "slow 0", "fast 1", "slow 1", "fast 2", "fast 3"]


def test_three_of_four_episodes_are_short() -> None:
    caps = script("rollout").mixed_caps(10)
    assert len(caps) == 10
    for four in (caps[0:4], caps[4:8]):
        *short, long = sorted(four)
        assert long == 30
        assert 4 <= short[0] <= short[2] <= 10


@dataclass
class _World:
    first: str = "first"

    async def step(self, action: str) -> StepResult:
        return StepResult(action)


def test_a_capped_episode_ends_after_its_number_of_actions() -> None:
    session = script("rollout").CappedSession(_World(), 2)
    results = [asyncio.run(session.step(action)) for action in ("look", "go")]
    assert session.first == "first"
    assert [(r.observation, r.done, r.truncated) for r in results] == [("look", False, False), ("go", True, True)]


# ---- gpu_update.py


def test_flops_of_an_update_by_hand() -> None:
    flops = script("gpu_update").update_flops(
        tokens=20,
        row_tokens=10,
        trained=3,
        layers=2,
        attention_width=4,
        block_weights=100,
        lora_weights=5,
        head_weights=7,
    )
    # 4 * 100 * 20 + 6 * 5 * 20 + 6 * 2 * 4 * 10 * 20 + 4 * 7 * 3
    assert flops == 8000 + 600 + 9600 + 84


def test_random_episodes_are_rows_of_4096_tokens_of_which_a_tenth_is_trained() -> None:
    first, second = script("gpu_update").random_episodes(2, vocabulary=512)
    [row] = rows_of(second)
    assert len(row) == 4096
    assert row.trained_tokens == 26 * 16
    assert (first.episode_return, second.episode_return) == (0.0, 1.0)
    assert sum(step.reward for step in second.steps) == 1.0


def test_the_model_has_the_published_number_of_weights() -> None:
    gpu_update = script("gpu_update")
    model = gpu_update.random_model(gpu_update.QWEN_7B, torch.bfloat16, "meta")
    lora = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(p.numel() for p in model.parameters()) - lora == 7_615_616_512
    assert lora == 161_480_704  # rank 64 on the seven linear layers of each of the 28 blocks


def test_the_tiny_model_is_updated_on_rows_of_their_own_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_update = script("gpu_update")
    for name, value in {"ROW_TOKENS": 128, "REPLIES": 4}.items():
        monkeypatch.setattr(gpu_update, name, value)
    args = argparse.Namespace(rows=2, rows_per_micro_batch=1, updates=1, tiny=True)
    seconds, metrics, _ = gpu_update.run(args, gpu=torch.cuda.is_available())
    assert len(seconds) == 1
    assert (metrics["rows"], metrics["tokens"], metrics["trained_tokens"]) == (2, 256, 128)
    assert metrics["padding_share"] == 0.0
    assert metrics["grad_norm"] > 0


# ---- launchers


@pytest.mark.parametrize("name", ["update", "rollout", "gpu_update", "kv_cache"])
def test_launchers_use_the_activated_environment(name: str, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$@" threads "$OMP_NUM_THREADS"\n')
    fake.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.defpath}", "VIRTUAL_ENV": str(tmp_path)}
    result = subprocess.run(
        [BENCH / f"{name}.sh", "--some", "argument"], cwd=tmp_path, env=variables, capture_output=True, text=True
    )
    assert result.stderr == ""
    assert result.stdout == f"scripts/bench/{name}.py --some argument threads 2\n"


# ---- noise_scale.py


def test_the_signal_of_a_gradient_is_what_different_groups_agree_on() -> None:
    noise_scale = script("noise_scale")
    # Gradients (1, 1), (1, -1), (1, 0): products off the diagonal 0, 1, 1, each twice; their mean is 2/3.
    gradients = torch.tensor([[1.0, 1.0], [1.0, -1.0], [1.0, 0.0]])
    estimate = noise_scale.pair_mean(gradients @ gradients.T)
    assert estimate.value == pytest.approx(2 / 3)
    # Left out one by one: 1, 1, 0. Jackknife: 2/3 of the squared deviations 1/9 + 1/9 + 4/9.
    assert estimate.high - estimate.value == pytest.approx(1.96 * (2 / 3 * 6 / 9) ** 0.5)
    assert noise_scale.noise_scale(noise=2.0, signal=0.5) == 3.0
    assert noise_scale.noise_scale(noise=2.0, signal=-0.1) == float("inf")


def test_the_jackknife_interval_holds_the_truth() -> None:
    noise_scale = script("noise_scale")
    held = 0
    for seed in range(200):
        draws = torch.randn(30, 20, generator=torch.Generator().manual_seed(seed)) + 0.5  # |G|^2 = 20 * 0.25
        estimate = noise_scale.pair_mean(draws @ draws.T)
        held += estimate.low <= 5.0 <= estimate.high
    assert 180 <= held <= 198
