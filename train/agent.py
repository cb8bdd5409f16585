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
    NOTE_REQUEST,
    PLAN_REQUEST,
    admissible_suffix,
    memory_suffix,
    note_prompt,
    notes_suffix,
    parse_reply,
    plan_prompt,
    reply_text,
    system_prompt,
    thin,
    transcript,
)
from train.recaller import Look, Recaller
from train.tokens import Codec
from train.trajectory import Context, Episode, Role, Step

if TYPE_CHECKING:
    from memory.guide import Guide


@dataclass(frozen=True)
class Job:
    """One episode to play. ``id`` is unique in its run: ``<phase>/<number>``; ``group`` joins those to compare.

    ``guided``: whether memory and table, where there are any, have a part in it. ``earlier``: the lost tries of the
    same start that this one follows, oldest first.
    """

    id: str
    phase: str
    task: Task
    seed: int
    group: str = ""
    guided: bool = True
    earlier: tuple[Episode, ...] = ()


@dataclass(frozen=True)
class Turn:
    """What a player said: raw text, and the thought and action parsed from it (action None: malformed).

    ``note``: what it wrote before its first turn on the try before (see :class:`Job`).
    """

    text: str
    thought: str | None
    action: str | None
    admissible: list[str] | None = None
    tokens_in: int = 0
    tokens_out: int = 0
    regulation: Regulation | None = None
    recall: Recall | None = None
    state: str = ""
    note: str = ""


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
    """One step of the loop."""
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
            state=turn.state,
            note=turn.note,
        )
    )
    return after


async def _timed(episode: Episode, call):  # type: ignore[no-untyped-def]
    started = time.perf_counter()
    try:
        return await call
    finally:
        episode.env_seconds += time.perf_counter() - started


PLAN_TURN, INSTANTIATION_TURN, NOTE_TURN = -1, -2, -3
"""Turns of :func:`call_seed` for the calls before the first action."""


def call_seed(run_seed: int, episode_id: str, turn: int, attempt: int = 0) -> int:
    """The random seed of one model call, keyed by episode, turn and attempt (31 bits, which every server accepts)."""
    digest = hashlib.sha256(f"{run_seed}/{episode_id}/{turn}/{attempt}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


RECALLED = "recalled"
"""Who wrote an action that was recalled (see :class:`~train.trajectory.Span`)."""


class PolicyPlayer:
    """The language model under training: an append-only dialogue of observations and replies.

    After lost tries of the same start it writes a note on the last one first, and is shown all notes (Reflexion; Shinn
    et al. 2023).

    With a ``guide`` it writes a plan and instantiates principles first, where the settings say so, each in a context of
    its own; what the guide has to show stands after the first observation. An action that the guide objects to is
    sampled again with the principle as feedback; when no attempt passes, the original is played and the attempts are
    dropped from the dialogue.

    With a ``recaller`` each reply may begin with a recalled thought, or be a recalled action, none of which is trained;
    or the thought is shown with the observation. A reply that is sampled again is the policy's own.
    """

    agent = "policy"

    def __init__(
        self,
        model: ChatModel,
        codec: Codec,
        job: Job,
        config: AgentConfig,
        temperature: float,
        run_seed: int,
        guide: Guide | None = None,
        recaller: Recaller | None = None,
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
        self._recaller = recaller
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
        hint = note = ""
        if step == 0:
            notes, note = await self._notes()
            hint = notes_suffix(notes)
        if self._guide is not None:
            if step == 0:
                hint += memory_suffix(await self._open(self._guide, result))
            elif self._last_action is not None:
                self._guide.played(self._last_action, result.observation, result.valid)
        look = await self._look(result, admissible)
        suffix = hint + look.hint + admissible_suffix(admissible)
        replies = [await self._first_reply(result.observation, suffix, look, step)]
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
        recall = await self._followed(look, thought, action)
        tokens = self._tokens_in, self._tokens_out
        return Turn(text, thought, action, admissible, *tokens, regulation, recall, look.state, note)

    async def _look(self, result: StepResult, admissible: list[str] | None) -> Look:
        if self._recaller is None:
            return Look()
        try:
            return await asyncio.to_thread(self._recaller.look, result, admissible)
        except EmbeddingFault as error:
            raise ModelFault(str(error)) from None

    async def _followed(self, look: Look, thought: str | None, action: str | None) -> Recall | None:
        if self._recaller is None:
            return None
        try:
            return await asyncio.to_thread(self._recaller.replied, look.recall, thought, action)
        except EmbeddingFault as error:
            raise ModelFault(str(error)) from None

    async def _first_reply(self, observation: str, suffix: str, look: Look, step: int) -> str:
        """The reply to an observation: the policy's, after an opening that was recalled, or a recalled action."""
        try:
            prompt = self._conversation.user(observation, suffix, look.opening)
        except ValueError as error:
            raise ModelFault(str(error)) from None
        if not look.action:
            return look.opening + await self._reply(prompt, step, 0)
        text = reply_text(look.action, None)
        self._conversation.demonstrate(text, step, trained=False, author=RECALLED)
        return text

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

    async def _notes(self) -> tuple[list[str], str]:
        """The notes on all lost tries, and the one of them that was written just now, on the last try."""
        lost = self._job.earlier
        if not lost or not self._config.note_tokens:
            return [], ""
        notes = [episode.steps[0].note for episode in lost if episode.steps and episode.steps[0].note]
        last = lost[-1]
        if last.status != "ok":
            return notes, ""
        turns = [(step.action or step.text, step.result) for step in last.steps]
        system, shown = note_prompt(self._job.task.env), transcript(last.steps[0].observation, turns)
        suffix = notes_suffix(notes) + NOTE_REQUEST
        try:
            # The transcript may take half of the context; of a longer one the middle is left out.
            room = self._config.context_tokens // 2
            written = await self._aside(system, shown, suffix, room, self._config.note_tokens, "note", NOTE_TURN, 0)
        except ValueError as error:
            raise ModelFault(str(error)) from None
        note = " ".join(written.split())
        return [*notes, note], note

    async def _open(self, guide: Guide, result: StepResult) -> str:
        """What the guide shows, after the plan that it searches with."""
        settings = guide.settings
        situation = Situation(result.goal, result.observation, self._job.task.type)
        asked = 0

        async def ask(system: str, question: str) -> str:
            nonlocal asked
            asked += 1
            length, room = settings.instantiation_tokens, self._config.context_tokens
            return await self._aside(system, question, "", room, length, "instantiation", INSTANTIATION_TURN, asked)

        try:
            if settings.plans:
                system, room = plan_prompt(self._job.task.env), self._config.observation_tokens
                plan = await self._aside(
                    system, result.observation, PLAN_REQUEST, room, settings.plan_tokens, "plan", PLAN_TURN, 0
                )
                situation = replace(situation, plan=" ".join(plan.split()))
            return await guide.open(situation, ask)
        except (EmbeddingFault, LanguageModelFault, ValueError) as error:
            raise ModelFault(str(error)) from None

    async def _aside(
        self, system: str, text: str, suffix: str, room: int, max_tokens: int, role: Role, turn: int, attempt: int
    ) -> str:
        """A question outside the dialogue, in a context of its own; ``text`` is cut in the middle to ``room`` tokens.

        Raises ValueError when it does not fit.
        """
        aside = Conversation(
            self._codec,
            system,
            context_tokens=self._config.context_tokens,
            observation_tokens=room,
            max_new_tokens=max_tokens,
        )
        prompt = aside.user(text, suffix)
        generation = await self._generate(prompt, max_tokens, turn, attempt)
        aside.reply(generation, 0, role)
        self._before += aside.contexts
        return generation.text

    def contexts(self) -> list[Context]:
        return self._before + self._conversation.contexts if self._codec.token_level else []

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


def start_conversation(codec: Codec, world: str, config: AgentConfig) -> Conversation:
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
