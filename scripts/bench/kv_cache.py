"""What the in-process engine gains by keeping keys and values: the same episodes with and without.

    scripts/bench/kv_cache.sh                        # some minutes on two cores, the warm start included
    scripts/bench/kv_cache.sh --steps 30

Household games (hard ones, so that episodes last), SmolLM2-135M in float32 with the quick start's LoRA, warm-started
(warm_policy.py). Each prompt goes on where the last turn of its episode ended, and the rollouts of a game share their
first one. Greedy, so that all sides play the same.

    nothing     each call computes its whole prompt
    episodes    what the episode's last turn has computed is kept (train.hf_model, ``share_prefixes`` off)
    all         and a new episode starts from what another one holds: as ``saga train`` rolls out

    computed    tokens that went through the model
    s, cpu s    seconds of the rollouts on the clock, and of all cores

Exit code 1: the sides did not play the same actions, or keeping costs more CPU time than it saves.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from update import clocks, load_model, settings, since
from warm_policy import BENCH, ROOT, warm_policy

if TYPE_CHECKING:
    from train.chat import Generation, Sampling
    from train.hf_model import HFChatModel
    from train.trajectory import Episode

SIDES = ("nothing", "episodes", "all")
OUT = BENCH / "kv_cache"


@dataclass
class Forgetful:
    """``chat`` for which every call is a new conversation."""

    chat: HFChatModel

    def __post_init__(self) -> None:
        self.name, self.adapter = self.chat.name, self.chat.adapter
        self._calls = itertools.count()

    async def complete(self, prompt_ids: list[int], sampling: Sampling, conversation: str) -> Generation:
        key = f"{conversation}/{next(self._calls)}"
        try:
            return await self.chat.complete(prompt_ids, sampling, key)
        finally:
            self.chat.release(key)

    def release(self, conversation: str) -> None:
        pass


class Counter:
    """Counts the tokens that go through ``model``."""

    def __init__(self, model: Any) -> None:
        self.tokens = 0
        model.get_base_model().register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: Any, args: Any, inputs: dict[str, Any]) -> None:
        self.tokens += inputs["input_ids"].numel()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--rollouts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    warm_policy()
    results = asyncio.run(measure(args))
    return report(results)


async def measure(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The figures of each side, all in this process, one after another."""
    from envs.tasksets import load_task_set
    from train.agent import Job, PolicyPlayer
    from train.hf_model import HFChatModel
    from train.rollouts import collect, env_pool
    from train.tokens import TokenCodec

    config = settings(args)
    assert config.grpo is not None
    model, tokenizer = load_model(config)
    codec, counter = TokenCodec(tokenizer), Counter(model)
    tasks = load_task_set(config.grpo.tasks, config.env.model_dump(mode="json"))
    jobs = [
        Job(f"bench/{game:03d}-{rollout}", "bench", task, seed=0)
        for game, task in enumerate(tasks)
        for rollout in range(args.rollouts)
    ]
    results: dict[str, dict[str, Any]] = {}
    async with env_pool(config) as pool:
        for session in await asyncio.gather(*(pool.open(task, 1) for task in tasks)):  # the workers have started
            await session.close()
        for side in SIDES:
            print(f"{side} ...", file=sys.stderr)
            file = OUT / f"{side}.jsonl.gz"
            file.unlink(missing_ok=True)
            chat = HFChatModel(
                model,
                codec,
                name=config.model.name,
                max_batch=len(jobs),
                max_context=config.agent.context_tokens,
                share_prefixes=side == "all",
            )
            player = chat if side != "nothing" else Forgetful(chat)
            counter.tokens, start = 0, clocks()
            episodes = await collect(
                pool,
                lambda job, player=player: PolicyPlayer(player, codec, job, config.agent, 0.0, config.run.seed),
                jobs,
                max_steps=args.steps,
                concurrency=len(jobs),
                file=file,
                description=side,
            )
            results[side] = {**since(start), "computed": counter.tokens, **figures(episodes)}
            await chat.close()
    return results


def figures(episodes: list[Episode]) -> dict[str, Any]:
    return {
        "steps": sum(len(episode.steps) for episode in episodes),
        "prompts": sum(episode.tokens_in for episode in episodes),
        "generated": sum(episode.tokens_out for episode in episodes),
        "actions": [[step.text for step in episode.steps] for episode in episodes],
    }


def report(results: dict[str, dict[str, Any]]) -> int:
    print(f"\n{'kept':10}{'steps':>7}{'prompts':>9}{'generated':>11}{'computed':>10}{'s':>8}{'cpu s':>8}")
    for side, row in results.items():
        print(
            f"{side:10}{row['steps']:7}{row['prompts']:9}{row['generated']:11}{row['computed']:10}"
            f"{row['seconds']:8.1f}{row['cpu']:8.1f}"
        )
    base, good = results["nothing"], True
    for side in SIDES[1:]:
        row = results[side]
        ratio = {name: row[name] / base[name] for name in ("computed", "seconds", "cpu")}
        good &= ratio["cpu"] <= 1 and row["actions"] == base["actions"]
        print(
            f"{side} / nothing: tokens computed {ratio['computed']:.2f}x, seconds {ratio['seconds']:.2f}x, "
            f"cpu seconds {ratio['cpu']:.2f}x, actions {'equal' if row['actions'] == base['actions'] else 'DIFFERENT'}"
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
