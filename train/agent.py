"""One episode: the loop of observation, reply and action, and the players that can sit in it."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from envs.base import EnvFault, StepResult, Task
from envs.pool import EnvPool, Session
from train.chat import ChatModel, ModelFault, Sampling
from train.config import AgentConfig
from train.conversation import Conversation
from train.prompts import MALFORMED, admissible_suffix, parse_reply, reply_text, system_prompt, thin
from train.tokens import TokenCodec
from train.trajectory import Context, Episode, Step


@dataclass(frozen=True)
class Job:
    """One episode to play. ``id`` is unique in its run: ``<phase>/<number>``; ``group`` joins rollouts of one start."""

    id: str
    phase: str
    task: Task
    seed: int
    group: str = ""


@dataclass(frozen=True)
class Turn:
    """What a player said: raw text, and the thought and action parsed from it (action None: malformed)."""

    text: str
    thought: str | None
    action: str | None
    admissible: list[str] | None = None
    tokens_in: int = 0
    tokens_out: int = 0


class Player(Protocol):
    """Someone who plays one episode."""

    agent: str
    model: str
    adapter: str

    async def act(self, session: Session, result: StepResult, step: int) -> Turn:
        """Answer to ``result``, the world's latest. Raises ModelFault, EnvFault."""

    def contexts(self) -> list[Context]:
        """Token sequences to train on; empty for players that are no language model."""

    def release(self) -> None:
        """The episode is over."""


async def play_episode(pool: EnvPool, player: Player, job: Job, max_steps: int) -> Episode:
    """Play ``job`` to its end. Faults of world or model end the episode with a status; they do not raise."""
    started = time.perf_counter()
    episode = Episode(
        id=job.id,
        phase=job.phase,
        env=job.task.env,
        task=job.task.id,
        task_type=job.task.type,
        seed=job.seed,
        group=job.group,
        agent=player.agent,
        model=player.model,
        adapter=player.adapter,
    )
    session: Session | None = None
    try:
        session = await _timed(episode, pool.open(job.task, job.seed))
        result = session.first
        episode.goal = result.goal
        # A memory will plan, retrieve and instantiate here: task and first observation are known, nothing is done yet.
        while not result.done and len(episode.steps) < max_steps:
            result = await _turn(player, session, result, episode)
        episode.won = result.won
        episode.truncated = result.truncated or not result.done
        episode.score = result.score
    except EnvFault as fault:
        episode.status, episode.error = "env_error", str(fault)
    except ModelFault as fault:
        episode.status, episode.error = "model_error", str(fault)
    finally:
        player.release()
        if session is not None:
            episode.expert_steps = session.expert_steps  # some worlds know it only once their expert was asked
            await session.close()
    episode.contexts = player.contexts()
    episode.episode_return = sum(step.reward for step in episode.steps)
    episode.seconds = time.perf_counter() - started
    return episode


async def _turn(player: Player, session: Session, result: StepResult, episode: Episode) -> StepResult:
    """One step of the loop. State summary and recall belong before ``act``, regulation between it and ``step``."""
    index = len(episode.steps)
    turn = await player.act(session, result, index)
    episode.tokens_in += turn.tokens_in
    episode.tokens_out += turn.tokens_out
    if turn.action is None:
        after = replace(result, observation=MALFORMED, reward=0.0, valid=False)
    else:
        after = await _timed(episode, session.step(turn.action))
    episode.steps.append(
        Step(
            index=index,
            observation=result.observation,
            text=turn.text,
            thought=turn.thought,
            action=turn.action,
            valid=after.valid,
            reward=after.reward,
            score=after.score,
            done=after.done,
            result=after.observation,
            admissible=turn.admissible,
        )
    )
    return after


async def _timed(episode: Episode, call):  # type: ignore[no-untyped-def]
    started = time.perf_counter()
    try:
        return await call
    finally:
        episode.env_seconds += time.perf_counter() - started


def call_seed(run_seed: int, episode_id: str, turn: int, attempt: int = 0) -> int:
    """The random seed of one model call, keyed by episode, turn and attempt (31 bits, which every server accepts)."""
    digest = hashlib.sha256(f"{run_seed}/{episode_id}/{turn}/{attempt}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class PolicyPlayer:
    """The language model under training: an append-only dialogue of observations and replies."""

    agent = "policy"

    def __init__(
        self, model: ChatModel, codec: TokenCodec, job: Job, config: AgentConfig, temperature: float, run_seed: int
    ) -> None:
        self.model = model.name
        self.adapter = model.adapter
        self._model = model
        self._job = job
        self._config = config
        self._temperature = temperature
        self._run_seed = run_seed
        self._conversation = start_conversation(codec, job.task.env, config)
        # Two attempts at one job are two conversations.
        self._key = f"{job.id}#{id(self)}"

    async def act(self, session: Session, result: StepResult, step: int) -> Turn:
        admissible = await listed_actions(session, self._config)
        try:
            prompt = self._conversation.user(result.observation, admissible_suffix(admissible))
        except ValueError as error:
            raise ModelFault(str(error)) from None
        sampling = Sampling(
            max_tokens=self._config.max_new_tokens,
            temperature=self._temperature,
            seed=call_seed(self._run_seed, self._job.id, step),
        )
        generation = await self._model.complete(prompt, sampling, self._key)
        self._conversation.reply(generation, step)
        thought, action = parse_reply(generation.text)
        return Turn(generation.text, thought, action, admissible, len(prompt), len(generation.token_ids))

    def contexts(self) -> list[Context]:
        return self._conversation.contexts

    def release(self) -> None:
        self._model.release(self._key)


class _TokenlessPlayer:
    """What players that are no language model share."""

    model = ""
    adapter = ""

    def contexts(self) -> list[Context]:
        return []

    def release(self) -> None:
        return None


class ExpertPlayer(_TokenlessPlayer):
    """The world's own expert."""

    agent = "expert"

    async def act(self, session: Session, result: StepResult, step: int) -> Turn:
        move = await session.expert()
        return Turn(reply_text(move.action, move.thought), move.thought or None, move.action)


class RandomPlayer(_TokenlessPlayer):
    """A uniformly random admissible action each step; seeded by the episode."""

    agent = "random"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def act(self, session: Session, result: StepResult, step: int) -> Turn:
        actions = await session.admissible()
        action = self._random.choice(actions) if actions else "look"
        return Turn(reply_text(action, None), None, action)


class HumanPlayer(_TokenlessPlayer):
    """You: reads actions from a prompt function, lists the admissible ones on ``?``."""

    agent = "human"

    def __init__(self, ask: Callable[[str], str]) -> None:
        self._ask = ask

    async def act(self, session: Session, result: StepResult, step: int) -> Turn:
        print(result.observation)
        while True:
            action = (await asyncio.to_thread(self._ask, f"[{step + 1}] ? lists actions > ")).strip()
            if action == "?":
                print("\n".join(await session.admissible()))
            elif action:
                return Turn(reply_text(action, None), None, action)


def start_conversation(codec: TokenCodec, world: str, config: AgentConfig) -> Conversation:
    """An empty dialogue under the configuration's prompt and budget."""
    return Conversation(
        codec,
        system_prompt(world, thoughts=config.thoughts),
        context_tokens=config.context_tokens,
        observation_tokens=config.observation_tokens,
        max_new_tokens=config.max_new_tokens,
        last_turns=config.last_turns,
    )


async def listed_actions(session: Session, config: AgentConfig) -> list[str] | None:
    """The admissible actions that the prompt lists; None when it lists none."""
    return thin(await session.admissible(), config.max_admissible) if config.show_admissible else None
