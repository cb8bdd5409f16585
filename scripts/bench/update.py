"""What an update costs with merged rows, and a whole iteration beside TRL's own agent training, on the same games.

    scripts/bench/update.sh                          # about twenty minutes on two cores, the warm start included
    scripts/bench/update.sh --sides "step rows" "merged rows"      # the updates only, on the episodes of the last run

Two household games x four rollouts x fifteen steps (hard games, so that episodes last), SmolLM2-135M in float32 with
the quick start's LoRA, warm-started (warm_policy.py). Every side runs in a process of its own, side after side.

    saga         one iteration: rollouts (train.rollouts, in-process model), then EpisodeGRPOTrainer.update
    merged rows  the update alone on those episodes, again: a row per episode (train.rows)
    step rows    the same episodes and trained tokens, but a row per step: its whole prompt, then what was generated
    last turns   the same episodes and trained tokens under ``agent.last_turns`` (4): a row per step, whose prompt holds
                 the first turn and the last four
    trl          one iteration of TRL 1.16's GRPOTrainer with ``environment_factory``, in-process generation

    rows, tokens         training sequences, and tokens in them without padding
    trained              tokens that carry loss
    padding              padding among the tokens of all micro-batches
    s, cpu s             seconds of the update, all of it, on the clock and of all cores (workers of the pool included);
                         other load on the machine distorts the second one less
    generated            tokens that the policy wrote
    rollout s, update s  the two parts of the iteration
    ms/step              seconds of the iteration per environment step, in ms
    GiB                  peak memory of the process

What the trl side was given, so that machinery is compared and nothing else:

- The games (envs.household in the trainer's process, as TRL's users do it) and the texts are the same: the tokenizer
  gets a chat template that renders a tool's answer as a user turn and no tool schema, and a ``response_template`` by
  which every reply is a call of the one tool ``act``. TRL takes this in place of its bundled templates, which would add
  a JSON schema to each prompt and a JSON call to each reply, and would end the episode at the first reply that is no
  call. First prompts are compared.
- At most ``max_new_tokens`` a turn by ``generation_kwargs``, else one turn could use up the whole completion; as many
  tool calls as episodes have steps (and one generation more: TRL's last answer calls nothing).
- TRL steps its environments one after another, generates for all rollouts together, and cannot be told that an episode
  is over: games won before the cap go on to cost it generations. Steps after the end are not counted.
- No gradient checkpointing, no KL, no dropout, lengths padded to multiples of 64: as our side. ``--trl-batch`` rows a
  micro-batch; one optimiser step an iteration.

Rewards are set by hand on all sides (every other rollout of a game gets 1), so that every group has signal.

The prompts of "last turns" are not those that the policy saw, so that its gradient is another one: its costs are what
is compared. In play they come on top, because no cache is reused.

Exit code 1: the gradients of merged and step rows differ by more than 1e-4 (norms, relative), first prompts differ, or
a goal is missed (merged rows 0.4x the seconds of step rows; saga's iteration 0.7x of trl's, per environment step too).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warm_policy import BENCH, CONFIG, POLICY_ALONE, ROOT, warm_policy

if TYPE_CHECKING:
    from train.config import AgentConfig, Config
    from train.tokens import TokenCodec
    from train.trajectory import Context, Episode

SIDES = ("saga", "merged rows", "step rows", "last turns", "trl")
LAST_TURNS = 4
GOAL_ROWS = 0.4
GOAL_ITERATION = 0.7
GRADIENT_TOLERANCE = 1e-4
RATIOS = {"rows": "rows", "tokens": "tokens", "seconds": "seconds", "cpu seconds": "cpu"}
OUT = BENCH / "update"
EPISODES = OUT / "episodes.jsonl.gz"

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.name + ' ' + call.function.arguments | tojson }}
    {%- else %}
        {{- message.content }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "close": "<|im_end|>",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "act", "arguments": {"reply": "{content}"}}},
        }
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--trl-batch", type=int, default=4)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = [f"--tasks={args.tasks}", f"--rollouts={args.rollouts}", f"--steps={args.steps}"]
    if args.side:
        play = {"saga": saga_iteration, "trl": trl_iteration}.get(args.side, update_alone)
        result = play(args)
        result["gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        result_file(args.side).write_text(json.dumps(result))
        return 0

    warm_policy()
    OUT.mkdir(parents=True, exist_ok=True)
    for side in SIDES:
        if side in args.sides:
            print(f"{side} ...", file=sys.stderr)
            result_file(side).unlink(missing_ok=True)
            command = [sys.executable, __file__, "--side", side, *sizes, f"--trl-batch={args.trl_batch}"]
            subprocess.run(command, check=True, stdout=sys.stderr)
    return report({side: json.loads(result_file(side).read_text()) for side in SIDES if result_file(side).exists()})


def result_file(side: str) -> Path:
    return OUT / f"{side.replace(' ', '-')}.json"


# ---- Shared by the sides


def settings(args: argparse.Namespace) -> Config:
    from train.config import load_config

    return load_config(
        CONFIG,
        [
            *POLICY_ALONE,
            "model.dtype=float32",
            f"env.max_steps={args.steps}",
            "agent.context_tokens=2048",  # some thirty steps of a hard game stay below: nothing is dropped
            f"grpo.tasks=household/hard/train:0-{args.tasks - 1}",
            f"grpo.groups={args.tasks}",
            f"grpo.group_size={args.rollouts}",
            "grpo.invalid_penalty=0",  # returns are set by hand
        ],
    )


def load_model(config: Config) -> tuple[Any, Any]:
    import torch

    from train.adapters import load_adapter
    from train.load import load_policy

    torch.set_num_threads(config.run.threads or torch.get_num_threads())
    model, tokenizer = load_policy(config.model)
    return load_adapter(model, warm_policy()[0], trainable=True), tokenizer


def hand_set_return(rollout: int) -> float:
    return float(rollout % 2)


def with_hand_set_returns(episodes: Sequence[Episode], group_size: int) -> list[list[Episode]]:
    """The episodes in groups, each with its return as the reward of its last step."""
    groups = [list(episodes[start : start + group_size]) for start in range(0, len(episodes), group_size)]
    for group in groups:
        for rollout, episode in enumerate(group):
            episode.episode_return = hand_set_return(rollout)
            for step in episode.steps:
                step.reward = 0.0
            episode.steps[-1].reward = episode.episode_return
    return groups


def a_context_a_step(contexts: Sequence[Context]) -> list[Context]:
    """One context per generation: everything before it as prompt, and the generation as its only span."""
    return [
        context.model_copy(update={"ids": context.ids[: span.end], "spans": [span]})
        for context in contexts
        for span in context.spans
    ]


def with_last_turns(episode: Episode, codec: TokenCodec, agent: AgentConfig) -> list[Context]:
    """The contexts of ``episode``, played without memory, as ``agent.last_turns`` would have built them."""
    from train.agent import start_conversation
    from train.chat import Generation

    spans = [(context, span) for context in episode.contexts for span in context.spans]
    conversation = start_conversation(codec, episode.env, agent)
    for step, (context, span) in zip(episode.steps, spans, strict=True):
        prompt = conversation.user(step.observation)
        ids = context.ids[span.start : span.end]
        generation = Generation(
            text=step.text,
            token_ids=ids,
            logprobs=span.logprobs or [],
            finish="stop" if ids[-1] == codec.eot_id else "length",
            prompt_tokens=len(prompt),
            adapter=span.adapter,
        )
        conversation.reply(generation, step.index)
    return conversation.contexts


def clocks() -> tuple[float, float]:
    """Seconds on the clock, and CPU seconds of this process and its children, so far."""
    import psutil

    process = psutil.Process()
    cpu = sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))
    return time.perf_counter(), cpu


def since(start: tuple[float, float], prefix: str = "") -> dict[str, float]:
    seconds, cpu = (end - begin for begin, end in zip(start, clocks(), strict=True))
    return {f"{prefix}seconds": seconds, f"{prefix}cpu": cpu}


def timed_update(trainer: Any, groups: list[list[Episode]], config: Config) -> dict[str, float]:
    from train.grpo import make_batch

    start = clocks()
    most_tokens = config.env.max_steps * config.agent.max_new_tokens
    metrics = trainer.update(make_batch(groups, trainer.settings, most_tokens))
    return {**metrics, **since(start)}


# ---- The sides


def saga_iteration(args: argparse.Namespace) -> dict[str, Any]:
    """Roll out and update once; the episodes stay in EPISODES for the sides that only update."""
    from envs.tasksets import load_task_set
    from train.agent import Job, PolicyPlayer
    from train.grpo import EpisodeGRPOTrainer
    from train.hf_model import HFChatModel
    from train.rollouts import collect, env_pool
    from train.tokens import TokenCodec

    config = settings(args)
    assert config.grpo is not None
    grpo = config.grpo
    model, tokenizer = load_model(config)
    codec = TokenCodec(tokenizer)
    tasks = load_task_set(grpo.tasks, config.env.model_dump(mode="json"))
    jobs = [
        Job(f"bench/{game:03d}-{rollout}", "bench", task, seed=0, group=f"bench/{game:03d}")
        for game, task in enumerate(tasks)
        for rollout in range(grpo.group_size)
    ]
    trainer = EpisodeGRPOTrainer(model, tokenizer, grpo, out_dir=OUT, seed=config.run.seed)
    EPISODES.unlink(missing_ok=True)

    async def iteration() -> tuple[list[Episode], dict[str, float]]:
        chat = HFChatModel(
            model,
            codec,
            name=config.model.name,
            max_batch=config.model.max_batch,
            max_context=config.agent.context_tokens,
        )
        async with env_pool(config) as pool:
            for session in await asyncio.gather(*(pool.open(task, 1) for task in tasks)):  # the workers have started
                await session.close()
            start = clocks()
            episodes = await collect(
                pool,
                lambda job: PolicyPlayer(chat, codec, job, config.agent, grpo.temperature, config.run.seed),
                jobs,
                max_steps=config.env.max_steps,
                concurrency=config.agent.concurrency,
                file=EPISODES,
                description="rollouts",
            )
            rollouts = since(start, "rollout_")
            groups = with_hand_set_returns(episodes, grpo.group_size)
            metrics = await asyncio.to_thread(timed_update, trainer, groups, config)
        await chat.close()
        return episodes, rollouts | metrics

    episodes, metrics = asyncio.run(iteration())
    return {
        **metrics,
        "episodes": len(episodes),
        "steps": sum(len(episode.steps) for episode in episodes),
        "won": sum(episode.won for episode in episodes),
        "malformed": sum(step.action is None for episode in episodes for step in episode.steps),
        "generated": sum(episode.tokens_out for episode in episodes),
        "prompts": sorted(
            {tuple(episode.contexts[0].ids[: episode.contexts[0].spans[0].start]) for episode in episodes}
        ),
        "environment_share": sum(e.env_seconds for e in episodes) / sum(e.seconds for e in episodes),
    }


def update_alone(args: argparse.Namespace) -> dict[str, Any]:
    from train.grpo import EpisodeGRPOTrainer
    from train.tokens import TokenCodec
    from train.trajectory import read_episodes

    config = settings(args)
    assert config.grpo is not None
    episodes = sorted(read_episodes(EPISODES), key=lambda episode: episode.id)
    if args.side == "step rows":
        for episode in episodes:
            episode.contexts = a_context_a_step(episode.contexts)
    model, tokenizer = load_model(config)
    if args.side == "last turns":
        agent, codec = config.agent.model_copy(update={"last_turns": LAST_TURNS}), TokenCodec(tokenizer)
        for episode in episodes:
            episode.contexts = with_last_turns(episode, codec, agent)
    trainer = EpisodeGRPOTrainer(model, tokenizer, config.grpo, out_dir=OUT, seed=config.run.seed)
    return timed_update(trainer, with_hand_set_returns(episodes, config.grpo.group_size), config)


def trl_iteration(args: argparse.Namespace) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from envs.base import Task
    from envs.household import HouseholdEnv
    from envs.tasksets import load_task_set
    from train.prompts import MALFORMED, parse_reply, system_prompt
    from train.rows import padded_length

    config = settings(args)
    assert config.grpo is not None
    grpo = config.grpo
    model, tokenizer = load_model(config)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    count = {"steps": 0, "won": 0, "malformed": 0}
    numbers = itertools.count()
    seen: dict[str, Any] = {}

    class Household:
        """A game as TRL wants it: each public method but ``reset`` and ``get_reward`` is a tool."""

        def __init__(self) -> None:
            self._env = HouseholdEnv(config.env.max_steps)
            self._rollout = next(numbers) % grpo.group_size
            self._over = False

        def reset(self, task: str, **_: Any) -> str:
            self._over = False
            return self._env.reset(Task("household", task, ""), 0).observation

        def act(self, reply: str) -> str:
            """Play one turn.

            Args:
                reply: The whole reply, with its line "Action: ...".
            """
            if self._over:
                return "The game is over."
            count["steps"] += 1
            action = parse_reply(reply)[1]
            if action is None:
                count["malformed"] += 1
                return MALFORMED
            result = self._env.step(action)
            self._over = result.done
            count["won"] += result.won
            return result.observation

        def get_reward(self) -> float:
            return hand_set_return(self._rollout)

    class TimedTrainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            start = clocks()
            batch = super()._generate_and_score_completions(inputs)
            seen.update(since(start, "rollout_"))
            seen["generated"] = clocks()
            return batch

        def _generate(self, prompts: Any) -> Any:
            output = super()._generate(prompts)
            seen["prompts"], seen["completions"], seen["trained"] = output[:3]
            return output

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen.update(since(seen["generated"]))

    tasks = load_task_set(grpo.tasks, config.env.model_dump(mode="json"))
    prompt = [
        {"role": "system", "content": system_prompt("household", thoughts=config.agent.thoughts)},
        {"role": "user", "content": ""},  # TRL appends what ``reset`` returns
    ]
    episodes = len(tasks) * grpo.group_size
    trainer = TimedTrainer(
        model=model,
        args=GRPOConfig(
            output_dir=str(OUT / "trl"),
            seed=config.run.seed,
            use_cpu=True,
            max_steps=1,
            num_generations=grpo.group_size,
            per_device_train_batch_size=args.trl_batch,
            gradient_accumulation_steps=episodes // args.trl_batch,
            max_completion_length=config.agent.context_tokens,
            max_tool_calling_iterations=config.env.max_steps,
            generation_kwargs={"max_new_tokens": config.agent.max_new_tokens},
            temperature=grpo.temperature,
            learning_rate=grpo.learning_rate,
            max_grad_norm=grpo.max_grad_norm,
            epsilon=grpo.clip_low,
            epsilon_high=grpo.clip_high,
            disable_dropout=True,
            pad_to_multiple_of=64,
            bf16=False,
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt, "task": task.id} for task in tasks]),
        processing_class=tokenizer,
        environment_factory=Household,
        callbacks=[Clock()],
    )
    trainer.train()
    prompts, completions = seen["prompts"], seen["completions"]
    tokens = sum(map(len, prompts)) + sum(map(len, completions))
    width = padded_length(max(map(len, prompts))) + padded_length(max(map(len, completions)))
    trained = sum(map(sum, seen["trained"]))
    return {
        **count,
        "rows": episodes,
        "tokens": tokens,
        "trained_tokens": trained,
        "padding_share": 1 - tokens / (episodes * width),
        "episodes": episodes,
        "generated": trained,
        **{name: seen[name] for name in ("rollout_seconds", "rollout_cpu", "seconds", "cpu")},
        "prompts": sorted(set(map(tuple, prompts))),
    }


# ---- The tables


def report(results: dict[str, dict[str, Any]]) -> int:
    good = True
    print(f"\n{'update':14}{'rows':>6}{'tokens':>9}{'trained':>9}{'padding':>9}{'s':>9}{'cpu s':>9}", end="")
    print(f"{'grad norm':>12}{'GiB':>6}")
    for side in ("step rows", "last turns", "merged rows", "trl"):
        if row := results.get(side):
            norm = f"{row['grad_norm']:.6f}" if "grad_norm" in row else ""
            print(
                f"{side:14}{row['rows']:6.0f}{row['tokens']:9.0f}{row['trained_tokens']:9.0f}"
                f"{row['padding_share']:9.1%}{row['seconds']:9.1f}{row['cpu']:9.1f}{norm:>12}{row['gib']:6.1f}"
            )
    if {"step rows", "merged rows"} <= results.keys():
        steps, merged = results["step rows"], results["merged rows"]
        good &= verdict("merged rows / step rows, seconds", merged["seconds"] / steps["seconds"], GOAL_ROWS)
        print(f"  cpu seconds: {merged['cpu'] / steps['cpu']:.2f}x")
        difference = abs(merged["grad_norm"] / steps["grad_norm"] - 1)
        good &= verdict("their gradient norms differ by (relative)", difference, GRADIENT_TOLERANCE)
    if {"last turns", "merged rows"} <= results.keys():
        last, merged = results["last turns"], results["merged rows"]
        ratios = [f"{name} {last[key] / merged[key]:.2f}x" for name, key in RATIOS.items()]
        print(f"last {LAST_TURNS} turns / merged rows: {', '.join(ratios)}")
    if {"saga", "trl"} <= results.keys():
        good &= report_iterations(results["saga"], results["trl"])
    return 0 if good else 1


def report_iterations(saga: dict[str, Any], trl: dict[str, Any]) -> bool:
    print(f"\n{'iteration':10}{'episodes':>9}{'steps':>7}{'malformed':>11}{'won':>5}{'generated':>11}", end="")
    print(f"{'rollout s':>11}{'update s':>10}{'total s':>9}{'cpu s':>8}{'ms/step':>9}{'GiB':>6}")
    for side, row in (("saga", saga), ("trl", trl)):
        row["total"] = row["rollout_seconds"] + row["seconds"]
        row["total_cpu"] = row["rollout_cpu"] + row["cpu"]
        row["per_step"] = row["total"] / row["steps"]
        print(
            f"{side:10}{row['episodes']:9}{row['steps']:7}{row['malformed']:11}{row['won']:5}{row['generated']:11}"
            f"{row['rollout_seconds']:11.1f}{row['seconds']:10.1f}{row['total']:9.1f}{row['total_cpu']:8.1f}"
            f"{1000 * row['per_step']:9.0f}{row['gib']:6.1f}"
        )
    ratio = {name: saga[name] / trl[name] for name in saga.keys() & trl.keys() if isinstance(saga[name], float)}
    good = verdict("saga / trl, seconds of an iteration", ratio["total"], GOAL_ITERATION)
    good &= verdict("saga / trl, seconds per environment step", ratio["per_step"], GOAL_ITERATION)
    print(
        f"  rollouts {ratio['rollout_seconds']:.2f}x, update {ratio['seconds']:.2f}x, "
        f"cpu seconds of the iteration {ratio['total_cpu']:.2f}x"
    )
    same = saga["prompts"] == trl["prompts"]
    print(f"first prompts: {'identical' if same else 'DIFFERENT'}")
    return good and same


def verdict(what: str, value: float, goal: float) -> bool:
    shown = f"{value:.2f}x" if value > 0.01 else f"{value:.1e}"
    print(f"{what}: {shown} (goal at most {goal:g}): {'met' if value <= goal else 'MISSED'}")
    return value <= goal


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
