import math
from pathlib import Path

import pytest
import torch
from trl import GRPOTrainer

from tests.tiny_policy import tiny_base, word_tokenizer
from train.adapters import load_adapter, new_adapter, save_adapter
from train.config import ConfigError, GrpoConfig, LoraConfig
from train.grpo import (
    EpisodeGRPOTrainer,
    clipped_policy_loss,
    kl_estimate,
    loss_scale,
    make_batch,
    truncated_importance_weights,
)
from train.trajectory import Context, Episode, Span, Step

pytestmark = pytest.mark.unit


def lora_weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def trainer_of(tmp_path: Path, model=None, **settings) -> EpisodeGRPOTrainer:
    model = model or new_adapter(tiny_base(), LoraConfig(rank=8, alpha=16), 0)
    config = GrpoConfig(tasks="household/easy/train:0-3", **settings)
    return EpisodeGRPOTrainer(model, word_tokenizer(), config, tmp_path / "trl", seed=0)


def full_logprobs(model, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of each token of ``ids`` from the second on, by the plain model."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def episode(model, prompt: list[int], completion: list[int], reward: float, shift: float = 0.0, **fields) -> Episode:
    """One context; the sampler's log-probabilities are the model's own plus ``shift``."""
    ids = prompt + completion
    logprobs = (full_logprobs(model, ids)[len(prompt) - 1 :] + shift).tolist()
    span = Span(start=len(prompt), end=len(ids), step=0, logprobs=logprobs)
    defaults = {"id": f"e{completion}", "phase": "collect", "env": "household", "task": "t", "task_type": "pick"}
    defaults["steps"] = [Step(index=0, observation="", text="", action="x", reward=reward)]
    return Episode(**(defaults | fields), seed=0, contexts=[Context(ids=[*ids, 3, 4], spans=[span])])


def update(trainer: EpisodeGRPOTrainer, groups: list[list[Episode]]) -> dict[str, float]:
    return trainer.update(make_batch(groups, trainer.settings, episode_tokens=10))


def groups_of(model) -> list[list[Episode]]:
    """Rows of very different lengths, two contexts in one episode."""
    long = list(range(1, 31)) * 4
    first = [episode(model, [1, 5, 9], [4, 7], 1.0), episode(model, [1, 5, 9], [8, 6, 2], 0.0, shift=0.3)]
    first[0].contexts += episode(model, [1, 20, 21], [22, 23], 0.0).contexts
    second = [
        episode(model, long, [10, 11, 12], 0.5),
        episode(model, long[:70], [13], 0.2),
        episode(model, [1], [9], 0.0),
    ]
    return [first, second]


def test_clipped_loss_by_hand() -> None:
    # Ratios 1.5, 0.5, 1.5, 0.5 against the bounds 0.8 and 1.28; A = 2, 2, -2, -2; weights 1, 1, 1, 0.5.
    # min(3, 2.56) = 2.56; min(1, 1.6) = 1; min(-3, -2.56) = -3; min(-1, -1.6) = -1.6.
    old = torch.log(torch.tensor([0.2, 0.2, 0.2, 0.2]))
    new = torch.log(torch.tensor([0.3, 0.1, 0.3, 0.1]))
    losses = clipped_policy_loss(
        new,
        old,
        torch.tensor([2.0, 2.0, -2.0, -2.0]),
        torch.tensor([1.0, 1.0, 1.0, 0.5]),
        clip_low=0.2,
        clip_high=0.28,
    )
    torch.testing.assert_close(losses, torch.tensor([-2.56, -1.0, 3.0, 0.8]))


def test_importance_weights_and_kl_by_hand() -> None:
    old, sampler = torch.log(torch.tensor([0.5, 0.1, 0.9])), torch.log(torch.tensor([0.25, 0.2, 0.1]))
    torch.testing.assert_close(truncated_importance_weights(old, sampler, 2.0), torch.tensor([2.0, 0.5, 2.0]))
    # r = reference / pi = 2: 2 - ln 2 - 1 = 0.306853; equal distributions: 0.
    kl = kl_estimate(torch.log(torch.tensor([0.1, 0.4])), torch.log(torch.tensor([0.2, 0.4])))
    torch.testing.assert_close(kl, torch.tensor([1 - math.log(2), 0.0]))


def test_loss_and_metrics_of_a_two_token_toy(tmp_path: Path) -> None:
    # Two episodes of one token each, returns 1 and 0, no division by the spread: A = 0.5, -0.5. At the first step
    # pi = pi_old, so the loss is -(0.5 w1 - 0.5 w2) / 2. The sampler's log-probabilities are shifted by +0.1 (w =
    # exp(-0.1) = 0.904837) and by -1 (w = min(2, e) = 2): loss = -(0.4524187 - 1) / 2 = 0.2737907.
    trainer = trainer_of(tmp_path, normalise_std=False)
    group = [episode(trainer.model, [1, 5], [4], 1.0, shift=0.1), episode(trainer.model, [1, 5], [8], 0.0, shift=-1.0)]
    metrics = update(trainer, [group])
    assert metrics["loss"] == pytest.approx(0.2737907, abs=1e-6)
    assert metrics["sampler_kl"] == pytest.approx((0.1 - 1.0) / 2, abs=1e-5)
    assert metrics["sampler_max_difference"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["sampler_mean_difference"] == pytest.approx((0.1 + 1.0) / 2, abs=1e-5)
    assert metrics["truncated_share"] == 0.5
    assert metrics["clip_fraction"] == 0.0
    assert (metrics["rows"], metrics["tokens"], metrics["trained_tokens"]) == (2, 6, 2)
    assert metrics["padding_share"] == pytest.approx(1 - 6 / 128)
    assert metrics["optimiser_steps"] == 1
    assert trainer.updates == 1


def test_loss_scales_by_hand() -> None:
    # Two episodes with 3 and 1 trained tokens: means over tokens, over episodes, and over a constant length of 10.
    assert [loss_scale("token", 2, count, 4, 10) for count in (3, 1)] == [0.25, 0.25]
    assert [loss_scale("episode", 2, count, 4, 10) for count in (3, 1)] == [1 / 6, 0.5]
    assert [loss_scale("constant", 2, count, 4, 10) for count in (3, 1)] == [0.05, 0.05]


def gradient(tmp_path: Path, budget: int, groups=None, **settings) -> torch.Tensor:
    trainer = trainer_of(tmp_path, tokens_per_micro_batch=budget, **settings)
    with torch.no_grad():  # away from the start, where A has no gradient (B is zero)
        torch.manual_seed(1)
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    kept: list[torch.Tensor] = []

    def keep(*_) -> None:
        kept.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad]))

    trainer.optimizer.optimizer.register_step_pre_hook(keep)
    update(trainer, (groups or groups_of)(trainer.model))
    return kept[-1]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kl_coef": 0.1, "passes": 2, "learning_rate": 1e-2},
        {"aggregation": "episode", "step_weight": 1.0},
        {"aggregation": "constant", "mini_batch_groups": 1},
    ],
)
def test_token_budgets_change_no_gradient(tmp_path: Path, settings: dict) -> None:
    gradients = [gradient(tmp_path, budget, max_grad_norm=1e9, **settings) for budget in (64, 256, 4096)]
    assert gradients[0].norm() > 0.01
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients[2], gradients[0], atol=1e-5, rtol=1e-5)


def three_turns(model, *, rows: int) -> list[list[Episode]]:
    """A group of two episodes with three trained turns each, as one context or as one for each turn."""
    group = []
    for number, reward in enumerate((1.0, 0.0)):
        ids = [1 + number, 5, 9, 4, 7, 11, 12, 8, 6, 13, 14]
        spans = [(3, 5), (6, 8), (9, 11)]
        logprobs = full_logprobs(model, ids)
        marks = [
            Span(start=a, end=b, step=step, logprobs=logprobs[a - 1 : b - 1].tolist())
            for step, (a, b) in enumerate(spans)
        ]
        whole = episode(model, ids[:1], ids[1:], 0.0, id=f"e{number}")
        whole.steps = [
            Step(index=i, observation=f"o{i}", text="", action="x", reward=reward * (i == 2)) for i in range(3)
        ]
        whole.contexts = (
            [Context(ids=ids, spans=marks)]
            if rows == 1
            else [Context(ids=ids[: mark.end], spans=[mark]) for mark in marks]
        )
        group.append(whole)
    return [group]


@pytest.mark.parametrize("aggregation", ["token", "episode", "constant"])
def test_the_number_of_rows_changes_no_gradient(tmp_path: Path, aggregation: str) -> None:
    one, three = (
        gradient(
            tmp_path,
            256,
            lambda model, rows=rows: three_turns(model, rows=rows),
            aggregation=aggregation,
            step_weight=0.5,
            max_grad_norm=1e9,
        )
        for rows in (1, 3)
    )
    assert one.norm() > 0.01
    torch.testing.assert_close(three, one, atol=1e-6, rtol=1e-5)


def test_mini_batches_step_once_each_against_the_policy_at_the_start(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, mini_batch_groups=1, learning_rate=1e-2)
    metrics = update(trainer, groups_of(trainer.model))
    assert (metrics["optimiser_steps"], metrics["rows"], trainer.updates) == (2, 6, 2)
    # pi_old is the policy before the first step: of the sampler's own log-probabilities only the shift of 0.3 differs.
    assert metrics["sampler_max_difference"] == pytest.approx(0.3, abs=1e-5)


def test_loss_equals_that_of_trl(tmp_path: Path) -> None:
    """The same rows through TRL's own loss (DAPO normaliser), which knows the weight as part of the advantage."""
    trainer = trainer_of(tmp_path, temperature=0.8, aggregation="token")
    (rows,) = make_batch(groups_of(trainer.model), trainer.settings, 10).steps
    total = sum(item.row.trained_tokens for item in rows)
    part = trainer._tensors(rows)
    # A policy that has moved away from pi_old, so that ratios are clipped on both sides.
    part["old"] = trainer._logprobs(trainer.model, part)[0].detach() + torch.linspace(-0.6, 0.6, total)
    trainer._sums = {"loss": 0.0, "clip_fraction": 0.0, "entropy": 0.0, "base_kl": 0.0}
    ours = trainer.compute_loss(trainer.model, part)

    def spread(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(part["trained"].shape).masked_scatter(part["trained"], values)[:, 1:]

    weights = truncated_importance_weights(part["old"], part["sampler"], 2.0)
    trainer.epsilon_low, trainer.epsilon_high = 0.2, 0.28
    theirs = GRPOTrainer._compute_loss(
        trainer,
        trainer.model,
        {
            "prompt_ids": part["input_ids"][:, :1],
            "prompt_mask": part["attention_mask"][:, :1],
            "completion_ids": part["input_ids"][:, 1:],
            "completion_mask": part["attention_mask"][:, 1:],
            "tool_mask": part["trained"][:, 1:].long(),
            "advantages": spread(part["advantages"] * weights),
            "old_per_token_logps": spread(part["old"]),
            "num_items_in_batch": torch.tensor(float(total)),
        },
    )
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    assert trainer._sums["clip_fraction"] > 0


def test_the_first_step_needs_no_pass_for_the_old_logprobs(tmp_path: Path) -> None:
    """Two steps, two passes: pi_old is always the policy at the start, and only the second step's is computed ahead."""
    trainer = trainer_of(tmp_path, mini_batch_groups=1, passes=2, learning_rate=1e-2)
    groups = groups_of(trainer.model)
    with torch.no_grad():
        start = [
            trainer._logprobs(trainer.model, trainer._tensors(step))[0]
            for step in make_batch(groups, trainer.settings, 10).steps
        ]
    seen: list[torch.Tensor] = []
    ahead: list[bool] = []
    loss, logprobs = trainer.compute_loss, trainer._logprobs

    def spy_loss(model, inputs, *args, **kwargs):
        value = loss(model, inputs, *args, **kwargs)
        seen.append(inputs["old"])
        return value

    def spy_logprobs(model, part):
        ahead.append(not torch.is_grad_enabled())
        return logprobs(model, part)

    trainer.compute_loss, trainer._logprobs = spy_loss, spy_logprobs
    update(trainer, groups)
    assert ahead == [True, False, False, False, False]
    for old, expected in zip(seen, [*start, *start], strict=True):
        torch.testing.assert_close(old.sort().values, expected.sort().values, atol=1e-5, rtol=0)  # rows are reordered


def test_groups_without_signal_and_faulty_episodes_are_dropped_and_counted(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, invalid_penalty=0.5)
    model = trainer.model
    equal = [episode(model, [1, 5], [4], 0.1), episode(model, [1, 5], [8], 0.1)]
    lone = [episode(model, [1, 5], [4], 1.0), episode(model, [1, 5], [8], 0.0, status="env_error")]
    before = lora_weights(model).clone()
    metrics = update(trainer, [equal, lone])
    assert metrics == {"groups": 2, "zero_signal_groups": 2, "fault_episodes": 1, "optimiser_steps": 0}
    assert torch.equal(lora_weights(model), before)
    # Equal returns, but an invalid action makes a difference.
    step = Step(index=0, observation="", text="", action="x", valid=False, reward=0.1)
    penalised = [episode(model, [1, 5], [4], 0.1), episode(model, [1, 5], [8], 0.1, steps=[step])]
    metrics = update(trainer, [equal, penalised])
    assert (metrics["groups"], metrics["zero_signal_groups"], metrics["rows"]) == (2, 1, 2)
    assert not torch.equal(lora_weights(model), before)


def test_an_episode_without_a_token_of_a_trained_role_is_left_out(tmp_path: Path) -> None:
    """As one in which no principle was instantiated; the mean is over the others."""
    trainer = trainer_of(tmp_path, train_roles=["plan"])
    group = [episode(trainer.model, [1, 5], [4 + i], float(i)) for i in range(3)]
    for one in group[1:]:
        one.contexts[0].spans[0].role = "plan"
    (step,) = make_batch([group], trainer.settings, 10).steps
    assert [(row.row.trained_tokens, row.scale) for row in step] == [(1, 0.5), (1, 0.5)]
    group[1].contexts[0].spans[0].role = group[2].contexts[0].spans[0].role = "action"
    assert make_batch([group], trainer.settings, 10).steps == []


def test_demonstrations_are_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    group = [episode(trainer.model, [1, 5], [4], 1.0), episode(trainer.model, [1, 5], [8], 0.0)]
    group[1].contexts[0].spans[0].logprobs = None
    with pytest.raises(ValueError, match="without sampling log-probabilities"):
        update(trainer, [group])


def test_updates_raise_the_rewarded_and_lower_the_punished_completion(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, learning_rate=1e-2)
    model = trainer.model
    good, bad = [1, 5, 9, 4, 7], [1, 5, 9, 8, 6]

    def probabilities() -> tuple[float, float]:
        return tuple(float(full_logprobs(model, ids)[2:].sum()) for ids in (good, bad))

    before = probabilities()
    for _ in range(5):
        update(trainer, [[episode(model, good[:3], good[3:], 1.0), episode(model, bad[:3], bad[3:], 0.0)]])
    after = probabilities()
    assert after[0] > before[0] + 0.5
    assert after[1] < before[1] - 0.5
    assert not any(module.training for module in model.modules())
    # A second step over the same episodes leaves pi_old behind: clipping sets in.
    trainer.settings = trainer.settings.model_copy(update={"passes": 4})
    metrics = update(trainer, [[episode(model, good[:3], good[3:], 1.0), episode(model, bad[:3], bad[3:], 0.0)]])
    assert metrics["optimiser_steps"] == 4
    assert trainer.updates == 9


def test_kl_to_the_base_holds_the_policy_back(tmp_path: Path) -> None:
    def drift(kl_coef: float) -> float:
        trainer = trainer_of(tmp_path, learning_rate=1e-2, kl_coef=kl_coef)
        for _ in range(6):
            model = trainer.model
            group = [episode(model, [1, 5, 9], [4, 7], 1.0), episode(model, [1, 5, 9], [8, 6], 0.0)]
            metrics = update(trainer, [group])
        assert ("base_kl" in metrics) == (kl_coef > 0)
        return abs(
            float((full_logprobs(trainer.model, [1, 5, 9, 4, 7]) - full_logprobs(tiny_base(), [1, 5, 9, 4, 7])).sum())
        )

    assert drift(10.0) < 0.5 * drift(0.0)


def test_gradient_checkpointing_computes_layers_again_and_changes_no_gradient(tmp_path: Path) -> None:
    figures, passes = [], []
    for checkpointing in (False, True):
        model = tiny_base()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        calls: list[int] = []
        model.model.layers[0].self_attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        trainer = trainer_of(tmp_path, new_adapter(model, LoraConfig(rank=8, alpha=16), 0))
        batch = make_batch(groups_of(trainer.model), trainer.settings, 10)
        calls.clear()
        metrics = trainer.update(batch)
        figures.append([metrics[name] for name in ("loss", "grad_norm", "entropy")])
        passes.append(len(calls))
    assert figures[1] == pytest.approx(figures[0], rel=1e-5)
    assert passes[1] > passes[0]


def test_the_learning_rate_is_that_of_the_update(tmp_path: Path) -> None:
    """Adam's first step moves a weight by the learning rate, whatever its gradient."""
    moved = {}
    for rate in (1e-2, 2.5e-3):
        trainer = trainer_of(tmp_path, learning_rate=1e-2)
        before = [weight.detach().clone() for weight in trainer.model.parameters() if weight.requires_grad]
        trainer.update(make_batch(groups_of(trainer.model), trainer.settings, 10), rate)
        after = [weight.detach() for weight in trainer.model.parameters() if weight.requires_grad]
        moved[rate] = max(float((new - old).abs().max()) for new, old in zip(after, before, strict=True))
    assert moved == {rate: pytest.approx(rate, rel=1e-3) for rate in moved}


def test_save_and_restore_give_a_bit_equal_next_update(tmp_path: Path) -> None:
    straight = trainer_of(tmp_path, learning_rate=1e-2)
    groups = groups_of(straight.model)
    update(straight, groups)
    save_adapter(straight.model, tmp_path / "adapter", "tiny")
    straight.save(tmp_path / "state")
    drawn = torch.rand(3)
    update(straight, groups)

    resumed = trainer_of(tmp_path, load_adapter(tiny_base(), tmp_path / "adapter", trainable=True), learning_rate=1e-2)
    resumed.restore(tmp_path / "state")
    assert torch.equal(torch.rand(3), drawn)
    update(resumed, groups)
    assert torch.equal(lora_weights(resumed.model), lora_weights(straight.model))
    assert resumed.updates == straight.updates == 2

    restarted = load_adapter(tiny_base(), tmp_path / "adapter", trainable=True)
    forgetful = trainer_of(tmp_path, restarted, learning_rate=1e-2)
    update(forgetful, groups)
    assert not torch.equal(lora_weights(forgetful.model), lora_weights(straight.model))


def test_a_state_that_is_missing_damaged_or_of_another_adapter_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        trainer.restore(tmp_path / "absent")
    update(trainer, groups_of(trainer.model))
    trainer.save(tmp_path)
    other = trainer_of(tmp_path, new_adapter(tiny_base(), LoraConfig(rank=16), 0))
    with pytest.raises(ConfigError, match="belongs to another adapter"):
        other.restore(tmp_path)
    path = tmp_path / "grpo_state.pt"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ConfigError, match="cannot be read"):
        trainer.restore(tmp_path)
