"""One episode: the loop of observation, reply and action, and the players that can sit in it."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from envs.base import EnvFault, StepResult, Task
from envs.pool import EnvPool, Session
from memory.embedding import EmbeddingFault
from memory.instantiate import Situation
from memory.language_model import LanguageModelFault
from memory.usage import MemoryUse, Recall, Regulation
from train.chat import ChatModel, Generation, ModelFault, Sampling
from train.config import AgentConfig
from train.conversation import Conversation
from train.prompts import (
    MALFORMED,
    PLAN_REQUEST,
    admissible_suffix,
    memory_suffix,
    parse_reply,
    plan_prompt,
    reply_text,
    system_prompt,
    thin,
)
from train.tokens import TokenCodec
from train.trajectory import Context, Episode, Role, Step

if TYPE_CHECKING:
    from memory.guide import Guide


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
    regulation: Regulation | None = None
    recall: Recall | None = None


class Player(Protocol):
    """Someone who plays one episode."""

    agent: str
    model: str
    adapter: str

    @property
    def memory(self) -> MemoryUse | None:
        """What it was shown of the memory; None: it plays without."""

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
        episode.memory = player.memory
        if session is not None:
            episode.expert_steps = session.expert_steps  # some worlds know it only once their expert was asked
            await session.close()
    episode.contexts = player.contexts()
    episode.episode_return = sum(step.reward for step in episode.steps)
    episode.seconds = time.perf_counter() - started
    return episode


async def _turn(player: Player, session: Session, result: StepResult, episode: Episode) -> StepResult:
    """One step of the loop. State summary and recall belong before ``act``."""
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
            inventory=result.inventory,
            admissible=turn.admissible,
            regulation=turn.regulation,
            recall=turn.recall,
        )
    )
    return after


async def _timed(episode: Episode, call):  # type: ignore[no-untyped-def]
    started = time.perf_counter()
    try:
        return await call
    finally:
        episode.env_seconds += time.perf_counter() - started


PLAN_TURN, INSTANTIATION_TURN = -1, -2
"""Turns of :func:`call_seed` for the calls before the first action."""


def call_seed(run_seed: int, episode_id: str, turn: int, attempt: int = 0) -> int:
    """The random seed of one model call, keyed by episode, turn and attempt (31 bits, which every server accepts)."""
    digest = hashlib.sha256(f"{run_seed}/{episode_id}/{turn}/{attempt}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class PolicyPlayer:
    """The language model under training: an append-only dialogue of observations and replies.

    With a ``guide`` it writes a plan and instantiates principles first, where the settings say so, each in a context of
    its own; what the guide has to show stands after the first observation. An action that the guide objects to is
    sampled again with the principle as feedback; when no attempt passes, the original is played and the attempts are
    dropped from the dialogue.
    """

    agent = "policy"

    def __init__(
        self,
        model: ChatModel,
        codec: TokenCodec,
        job: Job,
        config: AgentConfig,
        temperature: float,
        run_seed: int,
        guide: Guide | None = None,
    ) -> None:
        self.model = model.name
        self.adapter = model.adapter
        self._model = model
        self._codec = codec
        self._job = job
        self._config = config
        self._temperature = temperature
        self._run_seed = run_seed
        self._guide = guide
        self._conversation = start_conversation(codec, job.task.env, config)
        self._before: list[Context] = []  # of the plan and the instantiations
        self._last_action: str | None = None
        self._tokens_in = self._tokens_out = 0  # of the present turn
        # Two attempts at one job are two conversations.
        self._key = f"{job.id}#{id(self)}"

    @property
    def memory(self) -> MemoryUse | None:
        return None if self._guide is None else self._guide.use

    async def act(self, session: Session, result: StepResult, step: int) -> Turn:
        self._tokens_in = self._tokens_out = 0
        admissible = await listed_actions(session, self._config)
        hint = ""
        if self._guide is not None:
            if step == 0:
                hint = memory_suffix(await self._open(self._guide, result))
            elif self._last_action is not None:
                self._guide.played(self._last_action, result.observation, result.valid)
        try:
            prompt = self._conversation.user(result.observation, hint + admissible_suffix(admissible))
        except ValueError as error:
            raise ModelFault(str(error)) from None
        replies = [await self._reply(prompt, step, 0)]
        thought, action = parse_reply(replies[0])
        regulation = None

        async def resample(feedback: str) -> str | None:
            try:
                prompt = self._conversation.reject(feedback)
            except ValueError as error:
                raise ModelFault(str(error)) from None
            replies.append(await self._reply(prompt, step, len(replies)))
            return parse_reply(replies[-1])[1]

        if self._guide is not None and action is not None:
            regulation = await self._guide.regulate(
                action,
                observation=result.observation,
                step=step,
                admissible=admissible,
                inventory=result.inventory,
                resample=resample,
            )
            if regulation is not None:
                if regulation.choice == "fallback":
                    self._conversation.fall_back()
                thought, action = parse_reply(replies[regulation.played])
        text = replies[regulation.played if regulation else 0]
        self._last_action = action
        return Turn(text, thought, action, admissible, self._tokens_in, self._tokens_out, regulation)

    async def _reply(self, prompt: list[int], step: int, attempt: int) -> str:
        """One sampled reply of the dialogue."""
        generation = await self._generate(prompt, self._config.max_new_tokens, step, attempt)
        self._conversation.reply(generation, step)
        return generation.text

    async def _generate(self, prompt: list[int], max_tokens: int, turn: int, attempt: int) -> Generation:
        sampling = Sampling(
            max_tokens=max_tokens,
            temperature=self._temperature,
            seed=call_seed(self._run_seed, self._job.id, turn, attempt),
        )
        generation = await self._model.complete(prompt, sampling, self._key)
        self._tokens_in += len(prompt)
        self._tokens_out += len(generation.token_ids)
        return generation

    async def _open(self, guide: Guide, result: StepResult) -> str:
        """What the guide shows, after the plan that it searches with."""
        settings = guide.settings
        situation = Situation(result.goal, result.observation, self._job.task.type)
        asked = 0

        async def ask(system: str, question: str) -> str:
            nonlocal asked
            asked += 1
            length = settings.instantiation_tokens
            return await self._aside(system, question, "", length, "instantiation", INSTANTIATION_TURN, asked)

        try:
            if settings.plans:
                system = plan_prompt(self._job.task.env)
                plan = await self._aside(
                    system, result.observation, PLAN_REQUEST, settings.plan_tokens, "plan", PLAN_TURN, 0
                )
                situation = replace(situation, plan=" ".join(plan.split()))
            return await guide.open(situation, ask)
        except (EmbeddingFault, LanguageModelFault, ValueError) as error:
            raise ModelFault(str(error)) from None

    async def _aside(
        self, system: str, text: str, suffix: str, max_tokens: int, role: Role, turn: int, attempt: int
    ) -> str:
        """A question outside the dialogue, in a context of its own. Raises ValueError when it does not fit."""
        aside = Conversation(
            self._codec,
            system,
            context_tokens=self._config.context_tokens,
            observation_tokens=self._config.observation_tokens if suffix else self._config.context_tokens,
            max_new_tokens=max_tokens,
        )
        prompt = aside.user(text, suffix)
        generation = await self._generate(prompt, max_tokens, turn, attempt)
        aside.reply(generation, 0, role)
        self._before += aside.contexts
        return generation.text

    def contexts(self) -> list[Context]:
        return self._before + self._conversation.contexts

    def release(self) -> None:
        self._model.release(self._key)


class _TokenlessPlayer:
    """What players that are no language model share."""

    model = ""
    adapter = ""
    memory: MemoryUse | None = None

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
