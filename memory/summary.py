"""An episode condensed into a state, deterministically and for any text world; and actions with roles for names.

Nothing here knows a world, a verb or a kind of task. What is a name is learnt: :class:`Words` hold the
kinds of things that actions name. A summary tells the task, what is at hand where the agent is, what was done
with the things that the task names, where else such things were seen, and how the last action ended.

Names are replaced by their role, so that what was learnt with one thing holds for another:

    Z, Y, X      a thing of the kind that the task names last, last but one, …; ``used``: it was acted on before
    here, this Z  the fixture (named in the first observation) that the last successful action was on
    a place with Y, a new place, a used place (open it)   other fixtures: what was seen there, or else whether the agent
                 was there and what few kinds of fixtures allow: with a thing what is known of the kind, with the
                 fixture alone what could be done when the agent left it
    something    any other thing
    ACT          a word that the task's text and actions share (where the actions that can be chosen are known)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal

from memory.grammar import ActionGrammar, kind
from memory.records import Record, TraceStep, Trajectory

StateKey = Literal["state", "scene", "task"]

_LETTERS = "ZYXWVUTS"
ACT = "ACT"
"""Stands for a word of the task that actions are made of."""
FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an the some any this that these those it its them they their you your i me my we our is are be to of in "
        "into on onto at from under over with by for and or then so as there here",
    )
)
"""Articles, pronouns, prepositions and the like: by these alone the phrasings of one kind of task differ."""
_NUMBERED = r"[^\W\d_]+ \d+"
"""A word and a number is a name, whether it was learnt or not."""


class Words(Record):
    """What the summariser knows of a world's language.

    ``kinds``: of the things that actions name. ``forms``: what can be done with fixtures, by kind: (fridge, cool
    something in it); ``uses``: the same of other things, in actions without a fixture. All are sorted.
    """

    kinds: tuple[str, ...] = ()
    forms: tuple[tuple[str, str], ...] = ()
    uses: tuple[tuple[str, str], ...] = ()

    @classmethod
    def learn(cls, trajectories: Sequence[Trajectory]) -> Words:
        """From the actions that were played and not refused, and those that could have been, where they were recorded.

        A name is a word with a number, or what stands in a slot of the actions' grammar.
        """
        actions: list[str] = []
        offered: set[str] = set()
        texts: set[str] = set()
        for trajectory in trajectories:
            texts.add(trajectory.goal)
            for step in trajectory.steps:
                texts |= {step.observation, step.result}
                actions += _accepted(step)
                offered.update(step.admissible or ())
        grammar = ActionGrammar.fit([*actions, *sorted(offered)], texts)
        named = {name for action in {*actions, *offered} for name in grammar.parse(action)[1]}
        named.update(name for action in {*actions, *offered} for name in re.findall(_NUMBERED, action))
        found = cls(kinds=tuple(sorted({kind(name) for name in named})))
        forms: set[tuple[str, str]] = set()
        uses: set[tuple[str, str]] = set()
        for trajectory in trajectories:
            if not trajectory.steps:
                continue
            fixtures = found.fixtures(trajectory.steps[0].observation, trajectory.goal)
            possible = {action for step in trajectory.steps for action in (*_accepted(step), *(step.admissible or ()))}
            for action in possible:
                names = found.names_in(action)
                fixed = [name for name in names if name in fixtures]
                group = forms if fixed else uses
                group.update((kind(name), found.form(action, name)) for name in fixed or names)
        return found.model_copy(update={"forms": tuple(sorted(forms)), "uses": tuple(sorted(uses))})

    def joined(self, other: Words) -> Words:
        """Both vocabularies."""
        return Words(
            kinds=tuple(sorted({*self.kinds, *other.kinds})),
            forms=tuple(sorted({*self.forms, *other.forms})),
            uses=tuple(sorted({*self.uses, *other.uses})),
        )

    def fixtures(self, observation: str, goal: str) -> set[str]:
        """The names in an episode's first observation, without those in the task's text."""
        return set(self.names_in(observation.replace(goal, " ") if goal else observation))

    def form(self, action: str, name: str) -> str:
        """``action`` as seen by ``name``: itself ``it``, others ``something``."""
        return self.pattern.sub(lambda found: "it" if found[0] == name else "something", action)

    @cached_property
    def specialities(self) -> dict[str, str]:
        """Of a kind of fixture the form that the fewest kinds share, if at most half of them do."""
        rare: dict[str, str] = {}
        for form, owners in sorted(self._rare_forms.items(), key=lambda item: (len(item[1]), item[0])):
            for name in owners:
                rare.setdefault(name, form)
        return rare

    @cached_property
    def verbs(self) -> set[str]:
        """The words of actions that are no names."""
        return {word for _, form in (*self.forms, *self.uses) for word in form.split()} - {"it", "something"}

    def special(self, form: str, *, fixed: bool) -> bool:
        """Whether few kinds share a form: at most half of the fixtures' kinds, a tenth of the others'."""
        return form in (self._rare_forms if fixed else self._rare_uses)

    @cached_property
    def _rare_forms(self) -> dict[str, set[str]]:
        return _shared_by_few(self.forms, 0.5)

    @cached_property
    def _rare_uses(self) -> dict[str, set[str]]:
        return _shared_by_few(self.uses, 0.1)

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Finds the names in a text, longest kind first, with the number behind it."""
        kinds = "|".join(re.escape(name) for name in sorted(self.kinds, key=lambda name: (-len(name), name)))
        return re.compile(rf"(?<!\w)(?:(?:{kinds})(?: \d+)?|{_NUMBERED})(?!\w)" if kinds else rf"(?<!\w){_NUMBERED}")

    def names_in(self, text: str) -> list[str]:
        """The names in ``text`` in the order of their first mention."""
        return list(dict.fromkeys(self.pattern.findall(text)))


def _accepted(step: TraceStep) -> list[str]:
    """Its action, unless the world refused it: a language model makes up actions that there are not."""
    return [step.action] if step.action and step.valid is not False else []


def _shared_by_few(forms: Sequence[tuple[str, str]], share: float) -> dict[str, set[str]]:
    """The kinds of each form that at most this share of all kinds, and at least one, has."""
    owners: dict[str, set[str]] = {}
    for name, form in forms:
        owners.setdefault(form, set()).add(name)
    most = max(1.0, share * len({name for name, _ in forms}))
    return {form: kinds for form, kinds in owners.items() if len(kinds) <= most}


@dataclass
class Tracker:
    """What one episode has shown so far.

    Args:
        goal, observation: how it began.
        key: what a state is made of (see :class:`memory.samem_settings.SamemSettings`).
    """

    words: Words
    goal: str
    observation: str
    key: StateKey = "state"
    _used: set[str] = field(default_factory=set)
    _at: dict[str, str] = field(default_factory=dict)
    """Of a thing the fixture where it was last seen."""
    _done: dict[str, list[str]] = field(default_factory=dict)
    """Of a thing that the task names the special forms of the actions on it, sorted."""
    _focus: dict[str, str] = field(default_factory=dict)
    """Of a letter the thing that was acted on last."""
    _moved: dict[str, str] = field(default_factory=dict)
    """Of a thing the last action on it and a fixture."""
    _free: set[str] = field(default_factory=set)
    """Things that can be acted on without a fixture now."""
    _left: dict[str, str] = field(default_factory=dict)
    """Of a fixture what few kinds allow and could be done with it alone when the agent was last there."""
    _names: dict[str, list[str]] = field(default_factory=dict)
    """Of an action its names: they are asked for at every step."""
    _here: str = ""
    _refused: bool = False

    def __post_init__(self) -> None:
        self._fixtures = self.words.fixtures(self.observation, self.goal)
        own = Words(kinds=tuple(sorted({kind(name) for name in self._fixtures})))
        # What this world named so far counts as well, so that a task's words are names before anyone acted on them.
        kinds = list(dict.fromkeys(kind(name) for name in self.words.joined(own).names_in(self.goal)))
        self._letters = dict(zip(reversed(kinds), _LETTERS, strict=False))
        self._task = self.lettered(self.goal.rstrip(". "))
        self._acts = sorted(set(re.findall(r"\w+", self._task)) & self.words.verbs - FUNCTION_WORDS)

    def played(self, action: str | None, result: str, valid: bool | None) -> None:
        """Tell what was played (None: nothing that is an action) and what the world answered."""
        self._refused = valid is False or action is None
        if action is None or self._refused:
            return
        names = self.words.names_in(action)
        before = self._here
        for name in names:
            if name in self._fixtures:
                self._here = name
        seen = [name for name in self.words.names_in(result) if name not in self._fixtures and name not in names]
        place = self._here
        if seen and place:
            for name in [name for name, where in self._at.items() if where == place and name not in seen]:
                del self._at[name]
            self._at.update(dict.fromkeys(seen, place))
        on_fixture = any(name in self._fixtures for name in names)
        for name in names:
            if name not in self._fixtures:
                self._note(name, action, names)
                if on_fixture:
                    self._moved[name] = self._with_letters(action)
                    self._at.pop(name, None)  # it changed place
        self._used.update(names)
        if before != self._here:
            self._used.add(self._here)

    def _look_round(self, admissible: Sequence[str]) -> None:
        """Note what can be done without a fixture, and with the present one alone."""
        self._free = set()
        rare = []
        for action in admissible:
            names = self._names_in(action)
            if not any(name in self._fixtures for name in names):
                self._free.update(names)
            elif names == [self._here] and self.words.special(form := self.words.form(action, self._here), fixed=True):
                rare.append(form)
        if self._here:
            self._left[self._here] = min(rare, default="")

    def _names_in(self, action: str) -> list[str]:
        if action not in self._names:
            self._names[action] = self.words.names_in(action)
        return self._names[action]

    def _content(self) -> str:
        """The task's words without those of a closed class, sorted, letters last: one text for all its phrasings."""
        words = set(re.findall(r"\w+", self._with_act(self._task))) - FUNCTION_WORDS
        return " ".join(sorted(words, key=lambda word: (word in _LETTERS, word)))

    @property
    def _carried(self) -> set[str]:
        """Things that were acted on with a fixture, and can be acted on without one now."""
        return {name for name in self._moved if name in self._free}

    def _with_letters(self, action: str) -> str:
        return self.words.pattern.sub(lambda found: self._letters.get(kind(found[0]), "something"), action)

    def _with_act(self, text: str) -> str:
        return re.sub(rf"\b(?:{'|'.join(self._acts)})\b", ACT, text) if self._acts else text

    def lift(self, action: str) -> str:
        """``action`` with the roles of its names."""
        parts = []
        end = 0
        for found in self.words.pattern.finditer(action):
            parts += [self._with_act(action[end : found.start()]), self.role(found[0])]
            end = found.end()
        return "".join([*parts, self._with_act(action[end:])])

    def role(self, name: str) -> str:
        """What ``name`` is in this episode now (see the module)."""
        letter = self._letters.get(kind(name), "")
        if name == self._here:
            return f"this {letter}" if letter else "here"
        if name not in self._fixtures:
            return f"{'used ' if name in self._used else ''}{letter}" if letter else "something"
        holds = self._holds(name)
        if holds:
            return f"{letter or 'a place'} with {holds}"
        status = "used" if name in self._used else "new"
        if letter:
            return f"a {status} {letter}"
        speciality = self.words.specialities.get(kind(name), "")
        if name in self._left and "something" not in speciality:
            speciality = self._left[name]
        return f"a {status} place" + (f" ({self._with_act(speciality)})" if speciality else "")

    def summary(self, admissible: Sequence[str] | None = None) -> str:
        """The state as text.

        Args:
            admissible: what the world would accept now, where that is known. The place is then told by the agent's
                options; the state tells what the agent holds, which actions on nothing but the task's things there
                are, and where it put such things; and the task is told by its content words, so that phrasings of one
                kind of task are one. Else the place is told, and what was seen here and elsewhere.
        """
        if admissible is not None:
            self._look_round(admissible)
        task = f"Task: {self._task if admissible is None else self._content()}"
        if self.key == "task":
            return task
        parts = [task]
        if admissible is None:
            place = self._letters.get(kind(self._here), "")
            parts.append(f"Place: {place or (kind(self._here) if self._here else 'start')}")
            seen = [name for name in self._at if name not in self._used and kind(name) in self._letters]
            for where, names in (
                ("Here", [name for name in seen if self._at[name] == self._here]),
                ("Elsewhere", [name for name in seen if self._at[name] != self._here]),
            ):
                if names:
                    parts.append(f"{where}: {' and '.join(sorted({self._letters[kind(name)] for name in names}))}")
        else:
            carried = {self._letters.get(kind(name), "something") for name in self._carried}
            parts.append(f"Holding: {', '.join(sorted(carried)) or 'nothing'}")
            at_hand = self._at_hand(admissible)
            if at_hand:
                parts.append(f"At hand: {', '.join(at_hand)}")
        if self.key == "scene":
            return ". ".join(parts)
        for name, letter in sorted(self._letters.items(), key=lambda item: item[1]):
            handled = [thing for thing in self._done if kind(thing) == name]
            if admissible is None and handled:
                parts.append(f"Handled: {len(handled)} {letter}")
            put = {self._moved[thing] for thing in handled if thing in self._moved and thing not in self._carried}
            if admissible is not None and put:
                parts.append(f"{letter}: {self._with_act(', '.join(sorted(put)))}")
            done = self._done.get(self._focus.get(letter, ""))
            if done:
                told = ", ".join(done)
                parts.append(f"Done with {letter}: {told if admissible is None else self._with_act(told)}")
        if self._refused:
            parts.append("Last action refused")
        return ". ".join(parts)

    def lettered(self, text: str) -> str:
        """``text`` with the letters of the things that the task names, as a summary has them: what was thought of one
        thing then holds for another. Other names stay."""
        for name, letter in self._letters.items():
            text = re.sub(rf"(?<!\w){re.escape(name)}(?: \d+)?(?!\w)", letter, text)
        return text

    def named(self, text: str) -> str:
        """``text`` with the kinds of things instead of their letters."""
        kinds = {letter: name for name, letter in self._letters.items()}
        kinds[ACT] = self._acts[0] if self._acts else ACT
        return re.sub(rf"\b(?:[{_LETTERS}]|{ACT})\b", lambda found: kinds.get(found[0], found[0]), text)

    def _at_hand(self, admissible: Sequence[str]) -> list[str]:
        """The lifted actions on nothing but things that the task names, other than what is carried anyway."""
        found = set()
        carried = self._carried
        for action in admissible:
            names = self._names_in(action)
            if names and all(
                name not in self._fixtures and kind(name) in self._letters and name not in carried for name in names
            ):
                found.add(self.lift(action))
        return sorted(found)

    def _holds(self, place: str) -> str:
        """The things that the task names which were seen at ``place``."""
        return " and ".join(
            sorted({role for name, where in self._at.items() if where == place if (role := self._goal_role(name))})
        )

    def _goal_role(self, name: str) -> str:
        letter = self._letters.get(kind(name), "")
        return f"{'used ' if name in self._used else ''}{letter}" if letter else ""

    def _note(self, thing: str, action: str, names: Sequence[str]) -> None:
        """Remember what was done with a thing that the task names, if it is special."""
        letter = self._letters.get(kind(thing))
        if letter is None:
            return
        self._focus[letter] = thing
        done = self._done.setdefault(thing, [])
        fixed = [name for name in names if name in self._fixtures]
        special = any(self.words.special(self.words.form(action, name), fixed=bool(fixed)) for name in fixed or [thing])
        form = self._with_letters(action)
        if special and form not in done:
            self._done[thing] = sorted([*done, form])


@lru_cache(maxsize=4096)
def situation(summary: str) -> str:
    """A state's summary without the task, and without what it was that was done: what states of several tasks have in
    common."""
    return re.sub(r"(Done with \w): [^.]*", r"\1", summary.partition(". ")[2])


@dataclass(frozen=True)
class Condensed:
    """Of each step of a trajectory: the state, the written thought with letters for the task's things, the action with
    roles for names, and so the actions at hand."""

    states: tuple[str, ...]
    thoughts: tuple[str, ...]
    lifted: tuple[str, ...]
    options: tuple[tuple[str, ...], ...]


def condense(trajectory: Trajectory, words: Words, key: StateKey, *, lift: bool) -> Condensed:
    """Go through a trajectory as an agent did.

    Args:
        lift: give actions and options with roles for names; else as they are.
    """
    first = trajectory.steps[0].observation if trajectory.steps else ""
    tracker = Tracker(words, trajectory.goal, first, key)
    states, thoughts, lifted, options = [], [], [], []
    for step in trajectory.steps:
        states.append(tracker.summary(step.admissible))
        thoughts.append(tracker.lettered(step.thought))
        change = tracker.lift if lift else str
        lifted.append(change(step.action) if step.action else "")
        options.append(tuple(dict.fromkeys(change(action) for action in step.admissible or ())))
        tracker.played(step.action, step.result, step.valid)
    return Condensed(tuple(states), tuple(thoughts), tuple(lifted), tuple(options))
