"""The memory in one episode: plan, retrieve, instantiate, show within a token budget, and regulate what the agent does.

:class:`Memory` is a snapshot of a store that the episodes of a phase share; :class:`Guide` serves one episode. Neither
knows who plays or in which world: texts come in and go out.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from memory.embedding import Embedder
from memory.grammar import ActionGrammar, kind
from memory.instantiate import (
    INSTRUCTIONS,
    Situation,
    find_name,
    instantiate_by_builder,
    instantiate_offline,
    instantiation_prompt,
    parse_instantiation,
)
from memory.language_model import LanguageModel
from memory.lifting import GRAMMAR_TRAJECTORIES, fit_grammar
from memory.predicates import PredicateHost, history_entry, make_context
from memory.records import MemoryRecordError, Predicate, PrincipleItem, Trajectory
from memory.retrieve import Entry, LevelIndex, utility
from memory.settings import MemorySettings
from memory.store import LedgerEntry, Store, Stored
from memory.usage import Check, Choice, Instantiation, MemoryUse, Regulation, Retrieved

Ask = Callable[[str, str], Awaitable[str]]
"""(system prompt, question) -> a model's answer. Raises ValueError when the question does not fit its context."""

HEADER = (
    "From earlier games. This is conditional guidance, no script: the task's own instructions take precedence over it."
)
"""Begins the memory's text in the prompt."""

FEEDBACK = "Before you do that, consider what earlier games taught. Choose again, in the same form."
"""Begins the answer to an action that violates a predicate; the principles follow."""

_LABELS = ("Earlier game", "Earlier game", "Procedure", "Rule")
_SHUFFLES = 64


class Memory:
    """What the episodes of a phase share: the store as it was at one moment, indexed for one action grammar.

    Args:
        store: read when the object is made; later only its records, which never change.
        settings: of use; ``settings.mode`` must not be ``none``.
        grammar: name of the action grammar of the world that is played; items of another one are left out.
        host: evaluates predicates; None only where nothing is regulated.
        builder: the model that ``instantiation: builder`` asks.
        hidden: ids of principles that are left out, for the arms of a validation.
        tried: id of a principle that every search finds first, whatever its status; "": none.

    Raises:
        MemoryRecordError: ``instantiation: builder`` without one, or regulation without a host.
        EmbeddingFault: the vectors cannot be made.
    """

    def __init__(
        self,
        store: Store,
        settings: MemorySettings,
        *,
        grammar: str,
        embedder: Embedder,
        host: PredicateHost | None,
        builder: LanguageModel | None = None,
        hidden: Collection[str] = (),
        tried: str = "",
    ) -> None:
        if settings.instantiation == "builder" and settings.mode in ("full", "shuffled") and builder is None:
            raise MemoryRecordError(
                "memory.instantiation: 'builder' needs memory.builder.model; name it, or set it to policy or offline"
            )
        if host is None and settings.mode in ("direct", "full") and settings.attempts:
            raise MemoryRecordError(
                f"memory.attempts: {settings.attempts} in mode {settings.mode!r} needs a PredicateHost; give one, or 0"
            )
        self.settings = settings
        self.store = store
        self.actions, self.names = learn_words(islice(store.trajectories(grammar=grammar), GRAMMAR_TRAJECTORIES))
        self.host = host
        self.builder = builder
        self.embedder = embedder
        self.snapshot = store.snapshot()
        self.provenance = store.provenance() | store.validated_on()
        """(world, task) of every trajectory that what may be shown rests on, and of every validation."""
        self.tried = tried
        self._trial = LevelIndex(3, [_entry(store.item(tried))] if tried else [], embedder)
        k = settings.retrieval
        if settings.mode == "trajectory":
            self._levels = {0: (self._trajectories(grammar), k.trajectories)}
        else:
            counts = ((3, k.principles), (2, k.procedures), (1, k.episodes))
            left_out = {*hidden, tried}
            self._levels = {level: (self._items(level, grammar, left_out), count) for level, count in counts if count}

    def _items(self, level: int, grammar: str, left_out: Collection[str]) -> LevelIndex:
        stored = self.store.items(level, statuses=self.settings.prompt_statuses, grammar=grammar)
        return LevelIndex(level, [_entry(item) for item in stored if item.id not in left_out], self.embedder)

    def _trajectories(self, grammar: str) -> LevelIndex:
        """Whole ones only; a success has utility 1, a failure 0."""
        entries = []
        for trajectory in self.store.trajectories(grammar=grammar):
            if trajectory.status == "complete" and trajectory.success is not None and trajectory.steps:
                text = query_text(situation_of(trajectory))
                entries.append(Entry(trajectory.id, text, trajectory.task_type, "", float(trajectory.success)))
                self.provenance.add((trajectory.world, trajectory.task))
        return LevelIndex(0, entries, self.embedder)

    def spend(self) -> dict[str, float]:
        """What instantiation by the builder took until now: ``builder_calls`` (paid), ``builder_cached``,
        ``builder_tokens_in``, ``builder_tokens_out`` and ``builder_cost``; empty where no builder is asked."""
        if self.builder is None:
            return {}
        spent = self.builder.spend.as_dict()
        return {f"builder_{name}": spent[name] for name in ("calls", "cached", "tokens_in", "tokens_out", "cost")}

    def close(self) -> None:
        """Close the store, the host and the builder's model that it was given."""
        self.store.close()
        if self.builder is not None:
            self.builder.close()
        if self.host is not None:
            self.host.close()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return not any(len(index) for index in (self._trial, *(index for index, _ in self._levels.values())))

    def guide(self, episode: str, count: Callable[[str], int]) -> Guide:
        """For one episode (see :class:`Guide`)."""
        return Guide(self, episode, count)

    def search(self, situation: Situation) -> list[Retrieved]:
        """The best items of each level, principles first. Raises EmbeddingFault."""
        levels = [(self._trial, 1), *self._levels.values()]
        if self.empty:
            return []
        vector = self.embedder.embed([query_text(situation)])[0]
        weights = self.settings.retrieval
        return [found for index, count in levels for found in index.search(vector, situation.task_type, count, weights)]


@dataclass(frozen=True)
class _Active:
    """A principle that may block: its predicate, and what is said when it is violated."""

    predicate: Predicate
    text: str
    rate: float
    """Share of steps on which its audit saw it fire."""


class Guide:
    """The memory's part in one episode.

    Args:
        memory: what is searched.
        episode: name of the episode; keys the random numbers of the mode ``shuffled``.
        count: number of tokens of a text, as the policy's tokenizer sees it.
    """

    def __init__(self, memory: Memory, episode: str, count: Callable[[str], int]) -> None:
        self._memory = memory
        self.settings = memory.settings
        self._episode = episode
        self._count = count
        self._situation = Situation("", "")
        self._active: dict[str, _Active] = {}
        self._history: list[dict[str, Any]] = []
        self.use = MemoryUse(mode=self.settings.mode, snapshot=memory.snapshot)

    async def open(self, situation: Situation, ask: Ask | None = None) -> str:
        """Retrieve and instantiate for ``situation``; returns what to show with the first observation ("": nothing).

        ``ask``: the policy, for ``instantiation: policy``. Raises EmbeddingFault, and whatever else ``ask`` raises.
        """
        self._situation = situation
        found = await asyncio.to_thread(self._memory.search, situation)
        made = [await self._instantiate(item, situation, ask) for item in found]
        levels = {item.item: item for item in found}
        text, kept = self._fit(made, levels)
        self.use = MemoryUse(
            mode=self.settings.mode,
            snapshot=self._memory.snapshot,
            plan=situation.plan,
            retrieved=tuple(found),
            instantiations=tuple(kept),
            text=text,
            tokens=self._count(text) if text else 0,
        )
        if self.settings.attempts:
            for item in kept:
                blocks = levels[item.item].status in self.settings.block_statuses or item.item == self._memory.tried
                if not item.suppressed and blocks:
                    self._activate(item, levels[item.item].status)
        return text

    async def _instantiate(self, found: Retrieved, situation: Situation, ask: Ask | None) -> Instantiation:
        if found.level == 0:
            return Instantiation(item=found.item, text=trajectory_text(self._memory.store.trajectory(found.item)))
        item = self._memory.store.item(found.item).item
        if not isinstance(item, PrincipleItem) or self.settings.mode == "direct":
            made = Instantiation(item=found.item, text=item.text())
        elif self.settings.instantiation == "offline":
            made = instantiate_offline(item, situation, self._memory.names)
        elif self.settings.instantiation == "builder":
            assert self._memory.builder is not None  # checked when the memory was made
            made = await asyncio.to_thread(instantiate_by_builder, self._memory.builder, item, situation)
        else:
            if ask is None:
                raise MemoryRecordError(
                    "memory.instantiation: 'policy' needs a player that is a language model; set it to offline"
                )
            try:
                answer = await ask(INSTRUCTIONS, instantiation_prompt(item, situation))
            except ValueError as error:
                return Instantiation(item=found.item, reason=f"the question does not fit: {error}")
            return parse_instantiation(found.item, answer)
        return made

    def _shuffled(self, made: Instantiation) -> str:
        return shuffle_words(made.text, f"{self._episode}/{made.item}", self._count)

    def _fit(self, made: Sequence[Instantiation], found: dict[str, Retrieved]) -> tuple[str, list[Instantiation]]:
        """The text of what fits the budget, best first, and what became of each item."""
        lines = [HEADER]
        kept: list[Instantiation] = []
        said: dict[str, str] = {}
        for item in made:
            if item.suppressed:
                kept.append(item)
                continue
            if item.text in said:
                kept.append(Instantiation(item=item.item, reason=f"says the same as {said[item.text]}"))
                continue
            shown = item
            if self.settings.mode == "shuffled":
                shown = item.model_copy(update={"text": self._shuffled(item)})
            line = _line(shown.text, found[item.item])
            if found[item.item].level == 0:
                line = self._cut(lines, line)
                shown = item.model_copy(update={"text": line.partition(": ")[2]})
            if self._count("\n".join([*lines, line])) > self.settings.budget_tokens:
                kept.append(Instantiation(item=item.item, reason="over the token budget"))
                continue
            said[item.text] = item.item
            lines.append(line)
            kept.append(shown)
        return ("\n".join(lines) if len(lines) > 1 else ""), kept

    def _cut(self, before: list[str], text: str) -> str:
        """A raw trajectory with lines left out of its middle until it fits."""
        lines = text.splitlines()
        cut = text
        while len(lines) > 4 and self._count("\n".join([*before, cut])) > self.settings.budget_tokens:
            del lines[len(lines) // 2 - 1 : len(lines) // 2 + 1]
            cut = "\n".join([*lines[: len(lines) // 2], "[…]", *lines[len(lines) // 2 :]])
        return cut

    def _activate(self, made: Instantiation, status: str) -> None:
        """Let the item block, if it has a predicate that passed its newest audit (a candidate may have had none), and
        violating it is judged harmful."""
        item = self._memory.store.item(made.item).item
        if not isinstance(item, PrincipleItem) or item.predicate is None:
            return
        harm = self._memory.store.judgements(made.item, "harm")
        if not harm or harm[-1].verdict.get("harmful") is not True:
            return
        audits = self._memory.store.judgements(made.item, "audit")
        verdict = audits[-1].verdict if audits else {}
        unaudited = not audits and status == "candidate" and status in self.settings.block_statuses
        if unaudited or verdict.get("decision") == "passed":
            self._active[made.item] = _Active(item.predicate, made.text, fire_rate(verdict))

    async def regulate(
        self,
        action: str,
        *,
        observation: str,
        step: int,
        admissible: Sequence[str] | None,
        inventory: Sequence[str] | None = None,
        resample: Callable[[str], Awaitable[str | None]],
    ) -> Regulation | None:
        """Check ``action``, and while it violates a principle have another one proposed, at most ``attempts`` times.

        Args:
            observation: what the agent saw before it acted. admissible: None where the world does not list them.
            inventory: what the agent holds; None where the world does not tell.
            resample: gives the feedback to the agent and returns its next proposal (None: a reply without an action,
                which does not pass).

        Returns:
            What was proposed, checked and chosen; None when no predicate is active.
        """
        if not self._active:
            return None
        proposals: list[str | None] = [action]
        checks: list[Check] = []
        feedback = ""
        for attempt in range(self.settings.attempts + 1):
            proposed = proposals[-1]
            if proposed is not None:
                new = await self._check(proposed, attempt, observation, step, admissible, inventory)
                checks += new
                violated = [check.item for check in new if check.outcome == "violated"]
                if not violated:
                    choice: Choice = "resampled" if attempt else "original"
                    return Regulation(proposals=tuple(proposals), checks=tuple(checks), choice=choice)
                feedback = "\n".join([FEEDBACK, *(f"- {self._active[item].text}" for item in violated)])
            if attempt < self.settings.attempts:
                proposals.append(await resample(feedback))
        return Regulation(proposals=tuple(proposals), checks=tuple(checks), choice="fallback")

    async def _check(
        self,
        action: str,
        attempt: int,
        observation: str,
        step: int,
        admissible: Sequence[str] | None,
        inventory: Sequence[str] | None,
    ) -> list[Check]:
        if self.settings.mode == "shuffled":
            return [
                Check(item=item, attempt=attempt, outcome="violated" if self._fires(item, step, attempt) else "idle")
                for item in self._active
            ]
        assert self._memory.host is not None  # checked when the memory was made
        situation = self._situation
        context = make_context(
            action,
            self._memory.actions.parse,
            observation=observation,
            goal=situation.goal,
            task_type=situation.task_type,
            step=step,
            history=self._history,
            admissible=admissible,
            inventory=inventory,
        )
        verdicts = await self._memory.host.check(
            {item: active.predicate for item, active in self._active.items()}, context
        )
        for item, verdict in verdicts.items():
            if verdict.outcome == "error":
                del self._active[item]
        return [
            Check(item=item, attempt=attempt, outcome=verdict.outcome, note=verdict.note)
            for item, verdict in verdicts.items()
        ]

    def _fires(self, item: str, step: int, attempt: int) -> bool:
        """Whether the control objects: at random, as often as the predicate does in its audit."""
        chance = random.Random(f"{self._episode}/{item}/{step}/{attempt}").random()
        return chance < self._active[item].rate

    def played(self, action: str, result: str, valid: bool) -> None:
        """Tell what was played and what the world answered."""
        self._history.append(history_entry(action, self._memory.actions.parse, result, valid))


def learn_words(trajectories: Iterable[Trajectory]) -> tuple[ActionGrammar, dict[str, float]]:
    """The action grammar of ``trajectories``, and the kinds of things that their actions name (``drawer``).

    Of each kind: the share of the trajectories with such an action whose task or first observation named it.
    """
    known = list(trajectories)
    grammar = fit_grammar(known)
    acted, announced = Counter[str](), Counter[str]()
    for trajectory in known:
        first = situation_of(trajectory)
        opening = f"{first.goal}\n{first.observation}"
        for name in {kind(name) for step in trajectory.steps if step.action for name in grammar.parse(step.action)[1]}:
            acted[name] += 1
            announced[name] += bool(find_name(name, opening))
    return grammar, {name: announced[name] / count for name, count in acted.items()}


def query_text(situation: Situation) -> str:
    """What items are compared with: the task and the plan; the first observation where no task is stated."""
    return "\n".join(part for part in (situation.goal or situation.observation, situation.plan) if part)


def situation_of(trajectory: Trajectory) -> Situation:
    """How ``trajectory`` began."""
    first = trajectory.steps[0].observation if trajectory.steps else ""
    return Situation(trajectory.goal, first, trajectory.task_type)


def trajectory_text(trajectory: Trajectory) -> str:
    """A raw trajectory as a transcript: the task and how it ended, then actions and answers."""
    lines = [f"{trajectory.goal or trajectory.task} ({'solved' if trajectory.success else 'not solved'})"]
    for step in trajectory.steps:
        lines.append(f"> {step.action or '(no action)'}")
        lines.append(step.result)
    return "\n".join(lines)


def shuffle_words(text: str, seed: str, count: Callable[[str], int]) -> str:
    """The words of ``text`` in random order, and as many tokens: the content-free control.

    Which words begin with a space changes the count; of 64 orders the first of equal length is taken, else the nearest.
    """
    words = text.split()
    generator = random.Random(seed)
    orders = [generator.sample(words, len(words)) for _ in range(_SHUFFLES)]
    others = [" ".join(order) for order in orders if order != words]
    wanted = count(text)
    return min(others, key=lambda other: abs(count(other) - wanted), default=text)


def fire_rate(audit: Mapping[str, Any]) -> float:
    """The share of steps on which an audit (see :class:`memory.audit_checks.Audit`) saw a predicate fire; else 0."""
    checks = audit.get("checks", [])
    return next((float(check["estimate"] or 0.0) for check in checks if check["name"] == "trigger_rate"), 0.0)


def ledger_entries(
    use: MemoryUse, regulations: Iterable[Regulation], episode: str, outcome: float | None
) -> list[LedgerEntry]:
    """What an episode adds to the ledgers of the items that it retrieved.

    ``followed``: steps whose played action met a requirement; ``violated``: steps whose first proposal did not.

    Args:
        episode: a name unique over runs. outcome: its score in [0, 1]; None: unknown (a fault).
    """
    followed: dict[str, int] = {}
    violated: dict[str, int] = {}
    for regulation in regulations:
        for check in regulation.checks:
            if check.outcome == "followed" and check.attempt == regulation.played:
                followed[check.item] = followed.get(check.item, 0) + 1
            if check.outcome == "violated" and check.attempt == 0:
                violated[check.item] = violated.get(check.item, 0) + 1
    return [
        LedgerEntry(
            item=made.item,
            episode=episode,
            outcome=outcome,
            retrieved=1,
            instantiated=int(not made.suppressed),
            suppressed=int(made.suppressed),
            followed=followed.get(made.item, 0),
            violated=violated.get(made.item, 0),
        )
        for made in use.instantiations
        if not made.item.startswith("t-")
    ]


def _entry(stored: Stored) -> Entry:
    return Entry(stored.id, stored.item.text(), stored.item.task_type, stored.status, utility(stored.ledger))


def _line(text: str, found: Retrieved) -> str:
    mark = ""
    if found.level == 3:
        mark = " (validated)" if found.status == "validated" else " (hypothesis)"
    return f"- {_LABELS[found.level]}{mark}: {text}"
