"""The policy that the benchmarks play with: SmolLM2-135M after a minute of warm start, so that it answers with actions.

    python scripts/bench/warm_policy.py        # once; writes runs/bench/warm-policy, a plain PEFT adapter, and
                                               # runs/bench/warm-policy-merged, whole weights in float32 (540 MB)

The base model never writes an action, so that its episodes would measure neither worlds nor turns of usual length. This
one has the form (40 expert episodes of easy households, one epoch) and wins some easy games, few hard ones.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "runs" / "bench"
CONFIG = ROOT / "configs" / "quickstart.yaml"
POLICY_ALONE = ["rounds=1", "collect=null", "memory=null", "samem=null"]
"""Overrides of what the benchmarks of play and update leave out."""
FOLDER = BENCH / "warm-policy"
MERGED = BENCH / "warm-policy-merged"
DEMONSTRATIONS = 40


def warm_policy() -> tuple[Path, Path]:
    """Folders of the adapter and of the merged weights, made first (in a process of its own) where they are absent."""
    if not MERGED.is_dir():
        subprocess.run([sys.executable, __file__], check=True)
    return FOLDER, MERGED


def train() -> None:
    import torch

    from envs.pool import EnvPool
    from envs.tasksets import load_task_set
    from train.adapters import new_adapter, save_adapter
    from train.agent import Job
    from train.config import WarmStartConfig, load_config
    from train.demonstrations import DemonstrationPlayer
    from train.load import load_policy, public_name
    from train.progress import progress
    from train.rollouts import collect
    from train.rows import rows_of
    from train.sft import optimiser_batches, train_sft
    from train.tokens import TokenCodec

    config = load_config(CONFIG, [*POLICY_ALONE, "model.dtype=float32", "env.max_steps=20"])
    warm = WarmStartConfig(tasks=f"household/easy/train:0-{DEMONSTRATIONS - 1}", epochs=1, tokens_per_batch=512)
    spec = config.env.model_dump(mode="json")
    jobs = [Job(f"demos/{i:03d}", "demos", task, 0) for i, task in enumerate(load_task_set(warm.tasks, spec))]
    recovery = {job.id for job in jobs[:: round(1 / warm.recovery_share)]}
    model, tokenizer = load_policy(config.model)
    model = new_adapter(model, config.lora, config.run.seed)
    codec = TokenCodec(tokenizer)
    file = BENCH / "demonstrations.jsonl.gz"
    file.unlink(missing_ok=True)

    async def play() -> list:
        async with EnvPool(spec, *config.pool.model_dump().values()) as pool:
            return await collect(
                pool,
                lambda job: DemonstrationPlayer(codec, job, config.agent, recovery=job.id in recovery, run_seed=0),
                jobs,
                max_steps=config.env.max_steps,
                concurrency=config.agent.concurrency,
                file=file,
                description="demonstrations",
            )

    rows = [row for episode in asyncio.run(play()) if episode.won for row in rows_of(episode)]
    steps = len(optimiser_batches([len(row) for row in rows], warm.epochs, warm.tokens_per_batch, config.run.seed))
    torch.set_num_threads(config.run.threads or torch.get_num_threads())
    with progress(steps, "warm start") as bar:
        train_sft(
            model,
            tokenizer,
            rows,
            warm,
            seed=config.run.seed,
            out_dir=BENCH / "sft",
            log=lambda step, metrics: bar.advance(loss=metrics["loss"]),
        )
    save_adapter(model, FOLDER, public_name(config.model.name))
    partial = MERGED.with_suffix(".partial")
    model.merge_and_unload().save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(MERGED)
    file.unlink()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    train()
