"""How noisy is a policy gradient? From the stored rollouts of a run's GRPO iterations, without playing anything.

    scripts/bench/noise_scale.sh RUN [--adapter FOLDER] [--groups N]

The policy gradient of each group of rollouts is computed by itself, for four rewards: success alone or with a
penalty for invalid actions, credited to episodes (GRPO) or also to steps (GiGPO). RUN is the folder of a run;
--adapter is the one its rollouts were sampled with, by default the run's lora.start (right for early iterations, before
the policy moves much).

    loud       groups with signal, of those read
    noise      E|g|^2: mean squared length of a group's gradient
    signal     |G|^2: squared length of the true gradient, the mean of g_i g_j over pairs of different groups, with half
               the width of its 95 % interval (jackknife over groups)
    scale      (noise - signal) / signal: how many loud groups a batch needs until its gradient is half signal (the
               "simple noise scale" of arXiv 1812.06162); inf where no signal was found
    towards    success: the mean of g_i s_j over pairs of different groups, s being the gradient of success alone;
               above zero where following this reward raises the share of games won, too; with a 95 % interval
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
REWARDS: dict[str, dict[str, float]] = {
    "success, GRPO": {"invalid_penalty": 0, "step_weight": 0},
    "success, GiGPO": {"invalid_penalty": 0, "step_weight": 1},
    "with penalty, GRPO": {"invalid_penalty": 0.1, "step_weight": 0},
    "with penalty, GiGPO": {"invalid_penalty": 0.1, "step_weight": 1},
}


@dataclass(frozen=True)
class Estimate:
    """A mean over pairs of different groups, with a 95 % interval of the jackknife over groups."""

    value: float
    low: float
    high: float


def pair_mean(products: Tensor) -> Estimate:
    """The mean of an (n, n) matrix of products off its diagonal; entry i, j is of groups i and j. n of at least 3."""
    count = len(products)
    matrix = products.double()
    off = matrix - torch.diag(matrix.diagonal())
    total = off.sum()
    without = total - off.sum(0) - off.sum(1)  # leaving each group out
    left_out = without / ((count - 1) * (count - 2))
    value = float(total / (count * (count - 1)))
    spread = 1.96 * math.sqrt((count - 1) / count * float(((left_out - left_out.mean()) ** 2).sum()))
    return Estimate(value, value - spread, value + spread)


def noise_scale(noise: float, signal: float) -> float:
    """tr(covariance) / |G|^2 in groups, from E|g|^2 and |G|^2 (McCandlish et al., arXiv 1812.06162)."""
    return (noise - signal) / signal if signal > 0 else math.inf


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run with GRPO iterations")
    parser.add_argument(
        "--adapter", type=Path, help="what the rollouts were sampled with (default: lora.start of the run)"
    )
    parser.add_argument("--groups", type=int, default=48, help="groups to read, from the first iteration on")
    args = parser.parse_args()

    from train.adapters import load_adapter
    from train.config import load_config
    from train.load import load_policy

    config = load_config(args.run / "config.yaml")
    if config.grpo is None:
        parser.error(f"{args.run}: this run has no grpo section; name one with GRPO iterations")
    adapter = args.adapter or config.lora.start
    if adapter is None:
        parser.error(f"{args.run}: lora.start is empty; name the adapter of the rollouts with --adapter")
    groups = read_groups(args.run, args.groups)
    model, tokenizer = load_policy(config.model)
    model = load_adapter(model, Path(adapter), trainable=True).eval()

    gradients = {
        name: group_gradients(model, tokenizer.pad_token_id, groups, config.grpo.model_copy(update=changes), name)
        for name, changes in REWARDS.items()
    }
    print_table(len(groups), gradients)
    return 0


def read_groups(run: Path, count: int) -> list[list[Any]]:
    from train.trajectory import read_episodes

    groups: list[list[Any]] = []
    for path in sorted((run / "episodes").glob("grpo-*.jsonl.gz")):
        members = defaultdict(list)
        for episode in read_episodes(path):
            members[episode.group].append(episode)
        groups += members.values()
        if len(groups) >= count:
            break
    return groups[:count]


def group_gradients(
    model: Any, pad_id: int, groups: Sequence[Sequence[Any]], settings: Any, name: str
) -> dict[int, Tensor]:
    """By the number of the group, the gradient (parameters,) that it alone gives; groups without signal have none."""
    from train.grpo import make_batch
    from train.logprobs import batch_tensors, trained_logprobs
    from train.progress import progress
    from train.rows import pack

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = {}
    with progress(len(groups), name) as bar:
        for number, group in enumerate(groups):
            batch = make_batch([group], settings.model_copy(update={"aggregation": "episode"}), 1)
            for rows in batch.steps:
                for part in pack([len(item.row) for item in rows], settings.tokens_per_micro_batch):
                    tensors = batch_tensors([rows[i].row for i in part], pad_id)
                    logprobs, _ = trained_logprobs(model, **tensors, temperature=settings.temperature)
                    weights = [rows[i].scale * value for i in part for value in rows[i].advantages]
                    (logprobs * torch.tensor(weights)).sum().backward()
                found[number] = torch.cat([parameter.grad.flatten() for parameter in parameters])
                model.zero_grad()
            bar.advance()
    return found


def print_table(groups: int, gradients: dict[str, dict[int, Tensor]]) -> None:
    from rich.console import Console

    from train.tables import compact_table

    table = compact_table(
        f"gradients of {groups} groups, one by one",
        ("reward", "loud", "noise", "signal", "scale", "towards success"),
        left=("reward",),
    )
    success = next(iter(gradients.values()))
    for name, found in gradients.items():
        own = torch.stack(list(found.values()))
        noise, signal = float((own**2).sum(1).mean()), pair_mean(own @ own.T)
        both = sorted(found.keys() & success.keys())
        left, right = torch.stack([found[i] for i in both]), torch.stack([success[i] for i in both])
        table.add_row(
            name,
            str(len(found)),
            f"{noise:.2g}",
            shown(signal),
            f"{noise_scale(noise, signal.value):.0f}",
            shown(pair_mean(left @ right.T)),
        )
    Console().print(table)


def shown(estimate: Estimate) -> str:
    """The value and half of its interval's width."""
    return f"{estimate.value:.1e} ± {(estimate.high - estimate.low) / 2:.0e}"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
