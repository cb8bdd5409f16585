"""Worlds with a hidden rule that is known to the test: what a builder finds can be checked against the truth.

A world is drawn by (family, seed). All its words are made up. A thing has to be fetched, treated with two devices and
brought to a place; one hidden rule of one of four families holds, and the actions that other families would make a rule
of are harmless there, so that they serve as decoys:

- ``order``: the first treatment must come before the second; the wrong way round spoils the thing, without a word.
- ``precondition``: the second treatment is refused until its device has been primed.
- ``prohibition``: one kind of device (even seeds) or one superfluous action (odd seeds) spoils the thing, silently.
- ``exception``: as ``precondition``, but one kind of thing needs no priming.

A spoiled thing cannot win. :class:`Explorer` plays these worlds with mistakes; it does not know the rule.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import cel

from envs.base import ExpertMove, StepResult, Task, TextEnv
from memory.grammar import ActionGrammar
from memory.predicates import compile_predicate, history_entry, make_context
from memory.records import Predicate, TraceStep, Trajectory
from tests.scripted_agents import read_constraints

Family = Literal["order", "precondition", "prohibition", "exception"]
FAMILIES: tuple[Family, ...] = ("order", "precondition", "prohibition", "exception")
MAX_STEPS = 16


@dataclass(frozen=True)
class Words:
    """The made-up vocabulary of one world: a verb (and a particle) per action, kinds of places, things and devices."""

    verbs: dict[str, str]
    particles: dict[str, str]
    places: tuple[str, str]
    things: tuple[str, str, str]
    first: tuple[str, str]
    """Kinds of devices for the first treatment."""
    second: str
    refusal: str
    goal: tuple[str, str]
    here: str

    @staticmethod
    def draw(rng: random.Random) -> Words:
        used: set[str] = set()

        def word() -> str:
            while True:
                made = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.choice((2, 3))))
                made += rng.choice(("", "k", "n", "r", "sh"))
                if made not in used:
                    used.add(made)
                    return made

        return Words(
            verbs={name: word() for name in ("go", "take", "first", "second", "prime", "put", "shake", "look")},
            particles={name: word() for name in ("go", "take", "first", "second", "put")},
            places=(word(), word()),
            things=(word(), word(), word()),
            first=(word(), word()),
            second=word(),
            refusal=f"{word()} {word()} {word()}.".capitalize(),
            goal=(word(), word()),
            here=word(),
        )

    def say(self, name: str, *names: str) -> str:
        """The action ``name``: verb, first name, particle, second name; going has its particle in front."""
        verb = self.verbs[name]
        if name == "go":
            return f"{verb} {self.particles[name]} {names[0]}"
        return " ".join([verb, *names[:1], *([self.particles[name], names[1]] if len(names) > 1 else [])])

    def form(self, name: str) -> str:
        """The template of the action, as a grammar learns it."""
        count = {"look": 0, "go": 1, "prime": 1, "shake": 1}.get(name, 2)
        return self.say(name, *(f"{{{number}}}" for number in range(count)))


class PlantedEnv(TextEnv):
    """One world; the task id (any text) and ``seed`` draw the start state.

    Attributes:
        broke: per step, whether the action broke the hidden rule; None where it was refused for another reason, so that
            the rule did not matter.
    """

    def __init__(self, family: Family, seed: int, max_steps: int = MAX_STEPS) -> None:
        super().__init__(max_steps)
        self.family = family
        rng = random.Random(f"planted/{family}/{seed}")
        self.words = Words.draw(rng)
        self.by_device = seed % 2 == 0
        self.bad_device = rng.choice(self.words.first)
        self.exempt = rng.choice(self.words.things)
        self.broke: list[bool | None] = []

    def _reset(self, task: Task, seed: int) -> StepResult:
        rng = random.Random(f"{task.id}/{seed}")
        words = self.words
        self.places = [f"{kind} {number}" for kind in words.places for number in (1, 2)]
        self.devices = {f"{kind} 1": rng.choice(self.places) for kind in (*words.first, words.second)}
        self.wanted = f"{rng.choice(words.things)} 1"
        self.things = {f"{kind} 1": rng.choice(self.places) for kind in words.things}
        self.target = rng.choice([place for place in self.places if place != self.things[self.wanted]])
        self.at = rng.choice(self.places)
        self.held: str | None = None
        self.done_to: dict[str, set[str]] = {thing: set() for thing in self.things}
        self.primed: set[str] = set()
        self.spoiled: set[str] = set()
        self.broke = []
        goal = f"{words.goal[0]} {self.wanted.split()[0]} {words.goal[1]} {self.target}"
        return StepResult(f"{self._view()} {', '.join(self.places)}. {goal}.", goal=goal)

    def _view(self) -> str:
        seen = [name for name, place in {**self.devices, **self.things}.items() if place == self.at]
        return f"{self.words.here} {self.at}: {', '.join(seen) or '-'}."

    def admissible(self) -> list[str]:
        words = self.words
        actions = [words.say("go", place) for place in self.places if place != self.at] + [words.say("look")]
        here = [device for device, place in self.devices.items() if place == self.at]
        actions += [words.say("prime", device) for device in here]
        if self.held is None:
            actions += [words.say("take", thing, self.at) for thing, place in self.things.items() if place == self.at]
        else:
            actions += [words.say("put", self.held, self.at), words.say("shake", self.held)]
            for device in here:
                name = "second" if device.startswith(words.second) else "first"
                actions.append(words.say(name, self.held, device))
        return sorted(actions)

    def breaks(self, action: str) -> bool | None:
        """Whether ``action`` would break the hidden rule now; None: it is refused for another reason."""
        if action not in self.admissible():
            return None
        words, verb = self.words, action.split()[0]
        if self.held is None:
            return False
        if self.family == "order":
            return verb == words.verbs["second"] and "first" not in self.done_to[self.held]
        if self.family == "prohibition":
            if self.by_device:
                return verb == words.verbs["first"] and action.split()[-2] == self.bad_device
            return verb == words.verbs["shake"]
        unprimed = verb == words.verbs["second"] and f"{words.second} 1" not in self.primed
        return unprimed and not (self.family == "exception" and self.held.startswith(self.exempt))

    def _step(self, action: str) -> StepResult:
        words = self.words
        breaks = self.breaks(action)
        self.broke.append(breaks)
        refused = breaks is None or (breaks and self.family in ("precondition", "exception"))
        if refused:
            return StepResult(words.refusal, valid=False)
        name = next(name for name, verb in words.verbs.items() if verb == action.split()[0])
        given = action.split()[1:]
        if breaks and self.held is not None:
            self.spoiled.add(self.held)
        won = False
        if name == "go":
            self.at = " ".join(given[1:])
        elif name == "take":
            self.held = " ".join(given[:2])
            self.things[self.held] = ""
        elif name == "prime":
            self.primed.add(" ".join(given))
        elif self.held is not None and name in ("first", "second"):
            self.done_to[self.held].add(name)
        elif self.held is not None and name == "put":
            self.things[self.held] = self.at
            whole = self.done_to[self.held] == {"first", "second"} and self.held not in self.spoiled
            won = self.held == self.wanted and self.at == self.target and whole
            self.held = None
        text = self._view() if name in ("go", "look") else f"{action}: {self.at}."
        return StepResult(text, score=float(won), done=won, won=won)

    def expert(self) -> ExpertMove:
        """The rule-abiding next action."""
        words, thing = self.words, self.wanted
        if self.held not in (None, thing):
            return ExpertMove(words.say("put", str(self.held), self.at))
        if self.held is None:
            return self._near(self.things[thing], words.say("take", thing, self.things[thing]))
        if "first" not in self.done_to[thing]:
            kinds = words.first
            if self.family == "prohibition" and self.by_device:
                kinds = tuple(kind for kind in kinds if kind != self.bad_device)
            return self._near(self.devices[f"{kinds[0]} 1"], words.say("first", thing, f"{kinds[0]} 1"))
        second = f"{words.second} 1"
        if "second" not in self.done_to[thing]:
            action = words.say("second", thing, second)
            here = self._near(self.devices[second], action)
            if here.action == action and self.breaks(action):
                return ExpertMove(words.say("prime", second))
            return here
        return self._near(self.target, words.say("put", thing, self.target))

    def _near(self, place: str, action: str) -> ExpertMove:
        return ExpertMove(action if self.at == place else self.words.say("go", place))

    def close(self) -> None:
        return None

    # ---- the truth as predicates

    def rule(self, valid: str = "h.valid") -> Predicate:
        """The hidden rule in CEL."""
        words, family = self.words, self.family
        if family == "prohibition" and self.by_device:
            return Predicate(
                trigger=f'action.verb == "{words.form("first")}"',
                requirement=f'!action.args[1].startsWith("{self.bad_device} ")',
            )
        if family == "prohibition":
            return Predicate(trigger="true", requirement=f'action.verb != "{words.form("shake")}"')
        before, slot = ("first", 0) if family == "order" else ("prime", 1)
        done = f'history.exists(h, {valid} && h.verb == "{words.form(before)}" && h.args[0] == action.args[{slot}])'
        if family == "exception":
            done += f' || action.args[0].startsWith("{self.exempt} ")'
        return Predicate(trigger=f'action.verb == "{words.form("second")}"', requirement=done)

    def false_rules(self) -> dict[str, Predicate]:
        """Predicates that are wrong here, by what is wrong with them."""
        words, true = self.words, self.rule()
        decoy = "prime" if self.family in ("order", "prohibition") else "shake"
        return {
            "inverted": Predicate(trigger=true.trigger, requirement=f"!({true.requirement})"),
            "decoy": Predicate(trigger="true", requirement=f'action.verb != "{words.form(decoy)}"'),
            "always": Predicate(trigger="true", requirement="false"),
            "never": Predicate(trigger='action.verb == "-"', requirement="false"),
            "good moves": Predicate(trigger="true", requirement=f'action.verb != "{words.form("take")}"'),
            "late": Predicate(trigger="true", requirement="step <= 10"),
        }


@dataclass
class Explorer:
    """Plays towards the goal without knowing the rule: it guesses what the rule leaves open, and slips now and then.

    ``careless``: share of random steps, half of them refused ones. After a refusal it may insist, and it then shakes
    and looks more than before: actions that go with failure without causing it.
    """

    env: PlantedEnv
    rng: random.Random
    careless: float = 0.12
    _first_first: bool = field(init=False)
    _primes: bool = field(init=False)
    _shakes: bool = field(init=False)
    _device: str = field(init=False)
    _insists: int = 0

    def __post_init__(self) -> None:
        self._first_first = self.rng.random() < 0.5
        self._primes = self.rng.random() < 0.5
        self._shakes = self.rng.random() < 0.3
        self._device = f"{self.rng.choice(self.env.words.first)} 1"

    def act(self, last: StepResult) -> str:
        env, words, rng = self.env, self.env.words, self.rng
        if rng.random() < self.careless:
            if rng.random() < 0.5:
                return rng.choice(env.admissible())
            return words.say("take", rng.choice(list(env.things)), rng.choice(env.places))
        if not last.valid and rng.random() < 0.5:
            return rng.choice([words.say("look"), words.say("shake", env.held or env.wanted)])
        return self._plan()

    def reconsider(self, feedback: str, rejected: Sequence[str]) -> str:
        """What to do instead of ``rejected``: what constraints in ``feedback`` ask for; else anything admissible."""
        for constraint in read_constraints(feedback):
            asked = constraint.others[0].split()[0] if constraint.others else ""
            if asked == self.env.words.verbs["first"]:
                self._first_first = True
            elif asked == self.env.words.verbs["prime"]:
                self._primes = True
            elif constraint.thing and self._device == f"{constraint.thing} 1":
                self._device = next(f"{kind} 1" for kind in self.env.words.first if kind != constraint.thing)
            action = self._plan()
            if action not in rejected:
                return action
        return self.rng.choice([action for action in self.env.admissible() if action not in rejected])

    def _plan(self) -> str:
        env, words, rng, thing = self.env, self.env.words, self.rng, self.env.wanted
        if env.held not in (None, thing):
            return words.say("put", str(env.held), env.at)
        if env.held is None:
            return env._near(env.things[thing], words.say("take", thing, env.things[thing])).action
        if self._shakes:
            self._shakes = False
            return words.say("shake", thing)
        for name in ("first", "second") if self._first_first else ("second", "first"):
            if name in env.done_to[thing]:
                continue
            device = self._device if name == "first" else f"{words.second} 1"
            move = env._near(env.devices[device], words.say(name, thing, device)).action
            if name == "second" and move.startswith(words.verbs["second"]) and device not in env.primed:
                self._insists += 1
                if self._primes or (self._insists > 1 and rng.random() < 0.2):
                    return words.say("prime", device)
            return move
        return env._near(env.target, words.say("put", thing, env.target)).action


@dataclass(frozen=True)
class Played:
    """``broke``: the world's own record, per step (see :class:`PlantedEnv`)."""

    trajectory: Trajectory
    broke: tuple[bool | None, ...]


def trace_step(index: int, before: StepResult, action: str, after: StepResult) -> TraceStep:
    """What an agent that saw ``before`` leaves behind of playing ``action``."""
    return TraceStep(
        index=index,
        observation=before.observation,
        action=action,
        result=after.observation,
        valid=after.valid,
        reward=after.reward,
    )


def explore(family: Family, seed: int, episodes: int, *, first: int = 0) -> list[Played]:
    """Episodes ``first`` and following of an explorer in the world (family, seed)."""
    env = PlantedEnv(family, seed)
    played = []
    for number in range(first, first + episodes):
        task = Task("planted", f"{family}/{seed}/{number}", "planted")
        result = env.reset(task, number)
        goal = result.goal
        explorer = Explorer(env, random.Random(f"explorer/{family}/{seed}/{number}"))
        steps: list[TraceStep] = []
        while not result.done:
            action = explorer.act(result)
            after = env.step(action)
            steps.append(trace_step(len(steps), result, action, after))
            result = after
        trajectory = Trajectory(
            source=f"run:planted/{task.id}",
            world="planted",
            grammar=f"{family}-{seed}",
            task=task.id,
            task_type=task.type,
            goal=goal,
            agent="explorer",
            success=result.won,
            score=result.score,
            steps=tuple(steps),
        )
        played.append(Played(trajectory, tuple(env.broke)))
    return played


def trajectories(played: Sequence[Played]) -> list[Trajectory]:
    return [one.trajectory for one in played]


@dataclass(frozen=True)
class Match:
    """How a predicate agrees with the hidden rule, over steps at which the rule could be broken."""

    precision: float
    """Share of the steps at which it is violated that broke the rule."""
    recall: float
    """Share of the steps that broke the rule at which it is violated."""
    stopped_well: float
    """Share of the taken actions of successful episodes at which it is violated."""

    @property
    def found(self) -> bool:
        return self.precision >= 0.9 and self.recall >= 0.9


def compare(predicate: Predicate, grammar: ActionGrammar, played: Sequence[Played]) -> Match:
    """Evaluate ``predicate`` at every step of ``played``, by the learnt ``grammar``."""
    program = cel.compile(compile_predicate(predicate).source)
    fired = broke = both = well = stopped = 0
    for one in played:
        history: list[dict[str, Any]] = []
        for step, truth in zip(one.trajectory.steps, one.broke, strict=True):
            assert step.action is not None
            context = make_context(
                step.action,
                grammar.parse,
                observation=step.observation,
                goal=one.trajectory.goal,
                task_type=one.trajectory.task_type,
                step=step.index,
                history=history,
            )
            if truth is not None:
                violated = program.execute(context) == 2
                if one.trajectory.success and step.valid:
                    well += 1
                    stopped += violated
                fired += violated
                broke += truth
                both += violated and truth
            history.append(history_entry(step.action, grammar.parse, step.result, step.valid))
    return Match(both / fired if fired else 0.0, both / broke if broke else 0.0, stopped / max(1, well))
