"""Stored losses and advantages of a tiny policy: a change in numerics, wanted or not, fails here.

The numbers were printed by this file's own functions (fp32, CPU); formulas are checked by hand in test_advantages.py
and test_grpo.py. If a change is meant, say in the commit why the numbers move.
"""

import random
from pathlib import Path

import pytest

from tests.made_up import made_up_groups, made_up_rows
from tests.tiny_policy import tiny_base, word_tokenizer
from train.adapters import new_adapter
from train.advantages import token_advantages
from train.config import GrpoConfig, LoraConfig, WarmStartConfig
from train.grpo import EpisodeGRPOTrainer, make_batch
from train.sft import train_sft

pytestmark = pytest.mark.unit

ARMS = {
    "grpo": {"aggregation": "token"},
    "gigpo": {"aggregation": "token", "step_weight": 1.0},
    "dr_grpo": {"normalise_std": False, "aggregation": "constant"},
    "episode_rloo_kl": {"baseline": "leave_one_out", "aggregation": "episode", "kl_coef": 0.05, "passes": 2},
}


def losses(tmp_path: Path, arm: str) -> list[list[float]]:
    """(loss, gradient norm) of three updates on fresh made-up groups."""
    model = new_adapter(tiny_base(), LoraConfig(rank=8, alpha=16), 0)
    settings = GrpoConfig(tasks="household/easy/train:0-3", learning_rate=1e-2, **ARMS[arm])
    trainer = EpisodeGRPOTrainer(model, word_tokenizer(), settings, tmp_path, seed=0)
    generator = random.Random(1)
    updates = [trainer.update(make_batch(made_up_groups(generator, [3, 4]), settings, 40)) for _ in range(3)]
    return [[update["loss"], update["grad_norm"]] for update in updates]


@pytest.mark.parametrize("arm", ARMS)
def test_updates(tmp_path: Path, arm: str) -> None:
    for seen, stored in zip(losses(tmp_path, arm), UPDATES[arm], strict=True):
        assert seen == pytest.approx(stored, rel=1e-3, abs=1e-5)


def sft_losses(tmp_path: Path) -> list[float]:
    logged: list[float] = []
    train_sft(
        new_adapter(tiny_base(), LoraConfig(rank=8, alpha=16), 0),
        word_tokenizer(),
        made_up_rows(random.Random(2), 6),
        WarmStartConfig(tasks="household/easy/train:0-3", epochs=1, learning_rate=1e-2, tokens_per_batch=256),
        seed=0,
        out_dir=tmp_path,
        log=lambda step, metrics: logged.append(metrics["loss"]),
    )
    return logged


def test_warm_start(tmp_path: Path) -> None:
    assert sft_losses(tmp_path) == pytest.approx(SFT, rel=1e-3)


def advantages() -> list[list[float]]:
    (group,) = made_up_groups(random.Random(3), [3])
    for episode in group:
        for step in episode.steps:
            step.observation = f"room {step.index % 2}"
    return token_advantages(group, GrpoConfig(tasks="household/easy/train:0-3", step_weight=1.0))


def test_advantages() -> None:
    for seen, stored in zip(advantages(), ADVANTAGES, strict=True):
        assert seen == pytest.approx(stored, rel=1e-6)


UPDATES = {
    "grpo": [[-0.04351376, 1.631592], [-0.08249496, 2.679147], [-0.146623, 1.383621]],
    "gigpo": [[0.08508159, 2.571503], [0.06136205, 2.160665], [-0.1474909, 2.272542]],
    "dr_grpo": [[-0.009838887, 0.3485582], [-0.005277872, 0.204827], [-0.03089577, 0.2932703]],
    "episode_rloo_kl": [[0.1634642, 2.452465], [0.01031566, 4.879079], [-0.195054, 0.7346386]],
}
SFT = [5.100606, 5.533473]
ADVANTAGES = [[2.22183421, 0.235102354], [-2.12292377], [0.309118199, 0.814711932, -0.299164586]]
