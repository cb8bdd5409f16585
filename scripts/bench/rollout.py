"""Episodes at their own pace beside lock-step batches, on the same vLLM server and the same games.

    scripts/bench/rollout.sh                            # a quarter of an hour on two cores, with vLLM's CPU build
    scripts/bench/rollout.sh --episodes 96 --concurrency 16 --rounds 2

SmolLM2-135M in float32, warm-started (warm_policy.py, merged weights), plays households at temperature 1. Lengths are
mixed as in training at 75 % success: easy and hard games, and of each four episodes three end after 4 to 10 steps, as
solved ones do, and one after 30, as lost ones do (drawn once, fixed seed); a win ends an episode earlier.

    concurrent   train.rollouts.collect: each episode asks for its next reply as soon as its world has answered, and the
                 next episode begins when one ends
    lock-step    batches of as many episodes: no world is asked before all replies are in, no reply before all worlds
                 have answered, and the next batch begins when the last episode has ended. Resets of the next batch are
                 made while stragglers play on, as on the other side. Both sides have the same players, pool and server

    s            wall time, without the start of server and workers
    cpu s        CPU seconds of server, workers and this process; other load on the machine distorts them less
    in flight    episodes in play, mean over the time
    world wait   time that episodes waited for their world (queue and reset included), share of their time in play

Before the sides the server is asked how many tokens a second it generates for one request and for several. The less
that grows, the less a batch with stragglers wastes: on a GPU it grows nearly with the requests, on CPU cores that are
busy with eight requests hardly any more. ``--lora`` serves the adapter instead, as a training run does: vLLM's LoRA
kernels for CPUs cost nearly the same for each token however many there are, so that little is left to win there.
The server's prefix cache is emptied before every side.

Exit code 1: an episode failed, or a goal is missed (1.3x the episodes per second of lock-step; world wait of the
concurrent side under 5 %).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from update import clocks, since
from warm_policy import BENCH, CONFIG, POLICY_ALONE, ROOT, warm_policy

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from train.agent import Job, PolicyPlayer, Turn
from train.config import Config, load_config
from train.rollouts import collect

if TYPE_CHECKING:
    from envs.base import StepResult, Task
    from envs.pool import EnvPool, Session
    from train.server_model import ServerModel
    from train.tokens import TokenCodec
    from train.trajectory import Episode

SIDES = ("lock-step", "concurrent")
GOAL_SPEED = 1.3
GOAL_WAIT = 0.05
MAX_STEPS = 30
OUT = BENCH / "rollout"


class Barrier:
    """Where the ``parties`` of a batch wait for each other; one that has left is not waited for."""

    def __init__(self, parties: int) -> None:
        self._parties = parties
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        """Return when all parties that have not left are waiting."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._open_if_complete()
        await future

    def leave(self) -> None:
        self._parties -= 1
        self._open_if_complete()

    def _open_if_complete(self) -> None:
        if len(self._waiting) >= self._parties:
            for future in self._waiting:
                future.set_result(None)
            self._waiting = []


class LockStepPlayer(PolicyPlayer):
    def __init__(self, barrier: Barrier, *args: Any) -> None:
        super().__init__(*args)
        self._barrier = barrier

    async def act(self, session: Session, result: StepResult, step: int) -> Turn:
        await self._barrier.wait()  # until all worlds have answered
        turn = await super().act(session, result, step)
        await self._barrier.wait()  # until all replies are in
        return turn

    def release(self) -> None:
        super().release()
        self._barrier.leave()


class CappedSession:
    """A session that ends after ``cap`` actions."""

    def __init__(self, session: Session, cap: int) -> None:
        self._session = session
        self._left = cap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def step(self, action: str) -> StepResult:
        result = await self._session.step(action)
        self._left -= 1
        return result if self._left else replace(result, done=True, truncated=not result.won)


class CappedPool:
    """A pool whose episode of seed i ends after ``caps[i]`` actions. All were announced to ``pool`` beforehand."""

    def __init__(self, pool: EnvPool, caps: Sequence[int]) -> None:
        self._pool = pool
        self._caps = caps

    def expect(self, pairs: object) -> None:
        return None

    async def open(self, task: Task, seed: int) -> CappedSession:
        return CappedSession(await self._pool.open(task, seed), self._caps[seed])


def mixed_caps(count: int) -> list[int]:
    """Step caps of ``count`` episodes: of each four that follow each other one is long, in a random place."""
    generator = random.Random(0)
    caps = []
    for _ in range(0, count, 4):
        four = [MAX_STEPS, *(generator.randint(4, 10) for _ in range(3))]
        generator.shuffle(four)
        caps += four
    return caps[:count]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="OpenMP threads of the server (CPU build)")
    parser.add_argument("--lora", action="store_true", help="serve the base model with the adapter, not merged weights")
    args = parser.parse_args()

    from train.load import BUNDLED, load_tokenizer, model_folder
    from train.tokens import TokenCodec
    from train.vllm_server import VLLMServer

    adapter, merged = warm_policy()
    config = load_config(
        CONFIG,
        [
            *POLICY_ALONE,
            "model.dtype=float32",
            f"env.max_steps={MAX_STEPS}",
            "agent.context_tokens=2048",  # thirty steps of a hard game stay below: nothing is dropped
            f"agent.concurrency={args.concurrency}",
            # Two games more than in play, so that the next ones are reset ahead of time.
            f"pool.envs_per_worker={-(-args.concurrency // 2) + 1}",
        ],
    )
    shutil.rmtree(OUT, ignore_errors=True)
    print("starting vLLM (a minute)", file=sys.stderr)
    server = VLLMServer(
        model_folder(BUNDLED) if args.lora else merged,
        served_name="policy",
        dtype=config.model.dtype,
        log=OUT / "vllm.log",
        max_model_len=config.agent.context_tokens,
        max_loras=2 * args.lora,
        max_lora_rank=config.lora.rank,
        cpu_cache_gib=2,
        threads=args.threads,
        start_s=900,  # a loaded machine imports vLLM three times slower
        env={"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"},  # the first: /reset_prefix_cache
    )
    codec = TokenCodec(load_tokenizer(config.model))
    with server:
        results = asyncio.run(measure(server.url, adapter, codec, config, args))
    return report(results, args)


async def measure(
    url: str, adapter: Path, codec: TokenCodec, config: Config, args: argparse.Namespace
) -> dict[str, list[dict[str, float]]]:
    import httpx

    from envs.household import household_task
    from train.rollouts import env_pool
    from train.server_model import ServerModel

    jobs = [
        Job(f"bench/{i:03d}", "bench", household_task("hard" if i // 4 % 2 else "easy", i), seed=i)
        for i in range(args.episodes)
    ]
    model = ServerModel([url], "policy", codec)
    results: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    try:
        await model.check()
        if args.lora:
            await model.load_adapter(adapter, "policy-v0000")
        await print_server_curve(model, codec, args.concurrency)
        for number in range(args.rounds):
            for side in SIDES:
                print(f"round {number + 1} of {args.rounds}: {side}", file=sys.stderr)
                httpx.post(f"{url}/reset_prefix_cache", trust_env=False, timeout=60).raise_for_status()
                async with env_pool(config) as pool:
                    warm = [household_task("easy", i) for i in range(config.pool.workers)]
                    for session in await asyncio.gather(*(pool.open(task, -1) for task in warm)):  # workers run now
                        await session.close()
                    pool.expect([(job.task, job.seed) for job in jobs])
                    capped = CappedPool(pool, mixed_caps(len(jobs)))
                    start = clocks()
                    play = concurrent if side == "concurrent" else lock_step
                    episodes = await play(capped, model, codec, config, jobs, OUT / f"{side}-{number}")
                    results[side].append(figures(episodes, since(start)))
    finally:
        await model.close()
    return results


async def concurrent(
    pool: Any, model: ServerModel, codec: TokenCodec, config: Config, jobs: Sequence[Job], folder: Path
) -> list[Episode]:
    return await collect(
        pool,
        lambda job: PolicyPlayer(model, codec, job, config.agent, 1.0, config.run.seed),
        jobs,
        max_steps=MAX_STEPS,
        concurrency=config.agent.concurrency,
        file=folder / "episodes.jsonl.gz",
        description="concurrent",
    )


async def lock_step(
    pool: Any, model: ServerModel, codec: TokenCodec, config: Config, jobs: Sequence[Job], folder: Path
) -> list[Episode]:
    size = config.agent.concurrency
    episodes: list[Episode] = []
    for start in range(0, len(jobs), size):
        batch = jobs[start : start + size]
        barrier = Barrier(len(batch))
        episodes += await collect(
            pool,
            lambda job, barrier=barrier: LockStepPlayer(  # type: ignore[misc]
                barrier, model, codec, job, config.agent, 1.0, config.run.seed
            ),
            batch,
            max_steps=MAX_STEPS,
            concurrency=size,
            file=folder / f"episodes-{start:04d}.jsonl.gz",
            description=f"lock-step batch {start // size + 1} of {-(-len(jobs) // size)}",
        )
    return episodes


async def print_server_curve(model: ServerModel, codec: TokenCodec, concurrency: int) -> None:
    """Tokens per second that the server generates for 1, 2, 4 … requests of equal length."""
    from train.chat import Sampling

    prompt = codec.start(None, "Describe a house with many rooms.")
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= 2 * concurrency]
    rates = []
    for size in [1, *sizes]:  # the first one warms up
        start = clocks()
        calls = (model.complete(prompt, Sampling(max_tokens=16, seed=i), f"curve {i}") for i in range(size))
        generated = sum(len(answer.token_ids) for answer in await asyncio.gather(*calls))
        rates.append(f"{size}: {generated / since(start)['seconds']:.1f}")
        for i in range(size):
            model.release(f"curve {i}")
    print(f"server, tokens/s by requests at a time: {', '.join(rates[1:])}")


def figures(episodes: Sequence[Episode], spent: dict[str, float]) -> dict[str, float]:
    in_play = sum(episode.seconds for episode in episodes)
    return {
        **spent,
        "episodes": len(episodes),
        "faults": sum(episode.status != "ok" for episode in episodes),
        "won": sum(episode.won for episode in episodes),
        "steps": sum(len(episode.steps) for episode in episodes),
        "generated": sum(episode.tokens_out for episode in episodes),
        "in_flight": in_play / spent["seconds"],
        "wait": sum(episode.env_seconds for episode in episodes) / in_play,
    }


def report(results: dict[str, list[dict[str, float]]], args: argparse.Namespace) -> int:
    lengths = sorted(mixed_caps(args.episodes))
    print(
        f"\n{args.episodes} episodes of {lengths[0]} to {lengths[-1]} steps, {args.concurrency} at a time, "
        f"{args.rounds} round(s); mean per round"
    )
    columns = ("s", "cpu s", "episodes/s", "steps", "steps/s", "tokens/s", "in flight", "world wait", "won")
    print(f"{'':12}" + "".join(f"{name:>12}" for name in columns))
    mean = {side: {key: sum(run[key] for run in runs) / len(runs) for key in runs[0]} for side, runs in results.items()}
    for side, row in mean.items():
        seconds = row["seconds"]
        print(
            f"{side:12}{seconds:12.1f}{row['cpu']:12.1f}{row['episodes'] / seconds:12.3f}{row['steps']:12.0f}"
            f"{row['steps'] / seconds:12.2f}{row['generated'] / seconds:12.1f}{row['in_flight']:12.1f}"
            f"{row['wait']:12.1%}{row['won']:12.1f}"
        )
    speed = mean["lock-step"]["seconds"] / mean["concurrent"]["seconds"]
    wait = mean["concurrent"]["wait"]
    faults = sum(row["faults"] for row in mean.values())
    good = speed >= GOAL_SPEED and wait < GOAL_WAIT and not faults
    print(
        f"concurrent / lock-step, episodes per second: {speed:.2f}x (goal {GOAL_SPEED}): "
        f"{'met' if speed >= GOAL_SPEED else 'MISSED'}"
    )
    print(f"  cpu seconds of lock-step: {mean['lock-step']['cpu'] / mean['concurrent']['cpu']:.2f}x")
    print(
        f"world wait of concurrent: {wait:.1%} (goal under {GOAL_WAIT:.0%}): {'met' if wait < GOAL_WAIT else 'MISSED'}"
    )
    if faults:
        print(f"FAULTS: {faults:.1f} episodes a round ended by a fault of world or model")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
