"""An expert for ALFWorld's text games that sees only the text: it searches, then finishes the task.

The stored walkthroughs of the games know where everything is. This expert does what an agent must do: it reads the
room and the goal, looks for the object in the most plausible places first, and carries the task out. It keeps a belief
about the room that every observation updates, whoever chose the action, so it can take over at any point of an episode.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from envs.base import ExpertMove

Prior = Mapping[str, Mapping[str, float]]
"""Object type -> receptacle type -> weight, for example ``{"mug": {"countertop": 3.0, "cabinet": 1.0}}``."""

NOTHING_HAPPENS = "Nothing happens."

STATIONS = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
"""Where an object is cleaned, heated or cooled."""

_ENTITY = r"([a-z]+ \d+)"
_GOALS = [
    ("pick_two_obj_and_place", "", r"put two (\w+) in (\w+)"),
    ("pick_two_obj_and_place", "", r"find two (\w+) and put them in (\w+)"),
    ("look_at_obj_in_light", "use", r"look at (\w+) under the (\w+)"),
    ("look_at_obj_in_light", "use", r"examine the (\w+) with the (\w+)"),
    ("pick_clean_then_place_in_recep", "clean", r"put a clean (\w+) in (\w+)"),
    ("pick_clean_then_place_in_recep", "clean", r"clean some (\w+) and put it in (\w+)"),
    ("pick_heat_then_place_in_recep", "heat", r"put a hot (\w+) in (\w+)"),
    ("pick_heat_then_place_in_recep", "heat", r"heat some (\w+) and put it in (\w+)"),
    ("pick_cool_then_place_in_recep", "cool", r"put a cool (\w+) in (\w+)"),
    ("pick_cool_then_place_in_recep", "cool", r"cool some (\w+) and put it in (\w+)"),
    ("pick_and_place_simple", "", r"put a (\w+) in (\w+)"),
    ("pick_and_place_simple", "", r"put some (\w+) on (\w+)"),
]


@dataclass(frozen=True)
class Goal:
    """What a task asks for.

    ``object``: type of the object ("mug"); ``target``: type of the receptacle to put it in, or of the lamp to use;
    ``verb``: "clean", "heat", "cool", "use" (a lamp) or "" (just bring it); ``count``: how many objects.
    """

    type: str
    object: str
    target: str
    verb: str
    count: int


def parse_goal(text: str) -> Goal:
    """Read a goal in ALFWorld's words, such as ``put a clean mug in cabinet.`` (two phrasings per task type).

    Raises:
        ValueError: a text that is none of ALFWorld's twelve templates.
    """
    words = text.strip().rstrip(".").lower()
    for task_type, verb, pattern in _GOALS:
        match = re.fullmatch(pattern, words)
        if match:
            return Goal(task_type, match[1], match[2], verb, 2 if task_type == "pick_two_obj_and_place" else 1)
    raise ValueError(f"goal: {text!r} is none of ALFWorld's templates; give for example 'put a clean mug in cabinet.'")


def type_of(entity: str) -> str:
    """``"mug 2"`` -> ``"mug"``."""
    return entity.split(" ")[0]


def search_order(receptacles: Iterable[str], weights: Mapping[str, float]) -> list[str]:
    """The receptacles from the most to the least plausible place.

    A type's weight is spread evenly over the receptacles of that type; equal ones go by type, then by number.
    """
    names = list(receptacles)
    number = Counter(map(type_of, names))

    def key(name: str) -> tuple[float, str, int]:
        kind, index = name.split(" ")
        return -weights.get(kind, 0.0) / number[kind], kind, int(index)

    return sorted(names, key=key)


def count_prior(walkthroughs: Iterable[Sequence[str]]) -> dict[str, dict[str, float]]:
    """Count where walkthroughs take each object type from, and beside which receptacle they use each lamp type."""
    counts: dict[str, Counter[str]] = {}
    for actions in walkthroughs:
        here = ""
        for action in actions:
            if match := re.fullmatch(rf"go to {_ENTITY}", action):
                here = match[1]
            elif match := re.fullmatch(rf"take {_ENTITY} from {_ENTITY}", action):
                counts.setdefault(type_of(match[1]), Counter())[type_of(match[2])] += 1
            elif here and (match := re.fullmatch(rf"use {_ENTITY}", action)):
                counts.setdefault(type_of(match[1]), Counter())[type_of(here)] += 1
    return {kind: {place: float(n) for place, n in sorted(counts[kind].items())} for kind in sorted(counts)}


def compatible_prior() -> dict[str, dict[str, float]]:
    """Equal weights for every receptacle type that may hold an object type, by the table of the alfworld package.

    Imports ``alfworld``. Lamps are not in its table: they get weight 1 on the furniture they stand on.
    """
    import envs.alfworld_engine  # noqa: F401  (imports alfworld without leaving the ALFWORLD_DATA that it sets)

    # isort: split
    from alfworld.gen.constants import VAL_RECEPTACLE_OBJECTS

    prior: dict[str, dict[str, float]] = {}
    for receptacle in sorted(VAL_RECEPTACLE_OBJECTS):
        for kind in sorted(VAL_RECEPTACLE_OBJECTS[receptacle]):
            prior.setdefault(kind.lower(), {})[receptacle.lower()] = 1.0
    for lamp in ("desklamp", "floorlamp"):
        prior[lamp] = dict.fromkeys(("desk", "sidetable", "dresser", "coffeetable", "diningtable", "shelf"), 1.0)
    return prior


class SearchExpert:
    """Plays one episode from text alone.

    Call :meth:`observe` after every action that was played, its own or another agent's, valid or not; :meth:`move`
    proposes the next one. It may be asked at any time; asked again, it proposes the same.

    Args:
        first_observation: what ``reset`` showed: the list of receptacles and "Your task is to: ...".
        prior: where object types (lamps included) tend to be; a type or place it lacks is searched last.

    Raises:
        ValueError: an observation without a list of receptacles, or a goal that is not ALFWorld's.
    """

    def __init__(self, first_observation: str, prior: Prior) -> None:
        room, found, task = first_observation.partition("Your task is to: ")
        self._receptacles = re.findall(rf"\ba {_ENTITY}", room)
        if not found or not self._receptacles:
            raise ValueError(
                "first_observation: no receptacles or no 'Your task is to: '; give the text that reset returned"
            )
        self.goal = parse_goal(task)
        self._prior = prior
        self._beside: list[str] = []  # receptacles within reach
        self._contents: dict[str, list[str]] = {}  # what was last seen in each receptacle that was looked into
        self._closed: set[str] = set()
        self._holding: str | None = None
        self._origin: dict[str, str] = {}  # object -> the receptacle that it was last taken from
        self._states: dict[str, set[str]] = {}  # object -> verbs done to it
        self._refused: set[tuple[str, str]] = set()  # (object, type of receptacle that does not take it)

    # -- belief ------------------------------------------------------------------------------------------------------

    def observe(self, action: str, observation: str) -> None:
        """Update the belief from ``observation``, the world's answer to ``action``."""
        if observation.strip() == NOTHING_HAPPENS:
            self._observe_refusal(action)
            return
        if match := re.search(rf"You arrive at {_ENTITY}", observation):
            self._beside = [match[1]]
        elif match := re.search(r"You are facing the (.*?)\. Next to it", observation):
            self._beside = re.findall(_ENTITY, match[1])
        elif match := re.search(rf"You pick up the {_ENTITY} from the {_ENTITY}", observation):
            self._holding = match[1]
            self._origin[match[1]] = match[2]
            self._forget(match[1])
        elif match := re.search(rf"You move the {_ENTITY} to the {_ENTITY}", observation):
            self._holding = None
            self._contents.setdefault(match[2], []).append(match[1])
        elif match := re.search(rf"You (clean|heat|cool) the {_ENTITY} using", observation):
            verbs = self._states.setdefault(match[2], set())
            verbs -= {"heat": {"cool"}, "cool": {"heat"}}.get(match[1], set())
            verbs.add(match[1])
        elif match := re.search(r"You are carrying: (.*)", observation):
            held = re.findall(_ENTITY, match[1])
            self._holding = held[0] if held else None
        elif "You are not carrying anything" in observation:
            self._holding = None
        if match := re.search(rf"(?:The {_ENTITY} is closed|You close the {_ENTITY})", observation):
            self._closed.add(match[1] or match[2])
        if match := re.search(rf"(?:On the {_ENTITY}|The {_ENTITY} is open\. In it), you see (.*)", observation):
            receptacle = match[1] or match[2]
            self._closed.discard(receptacle)
            seen = re.findall(rf"\ba {_ENTITY}", match[3])
            for thing in seen:
                self._forget(thing)
            self._contents[receptacle] = seen

    def _observe_refusal(self, action: str) -> None:
        if match := re.fullmatch(rf"go to {_ENTITY}", action):
            # Every receptacle can be reached from anywhere, unless it is within reach already.
            if match[1] in self._receptacles and match[1] not in self._beside:
                self._beside.append(match[1])
            return
        match = re.fullmatch(rf"move {_ENTITY} to {_ENTITY}", action)
        if match and match[1] == self._holding and match[2] in self._beside and match[2] not in self._closed:
            self._refused.add((match[1], type_of(match[2])))

    def _forget(self, thing: str) -> None:
        for things in self._contents.values():
            if thing in things:
                things.remove(thing)

    # -- policy ------------------------------------------------------------------------------------------------------

    def move(self) -> ExpertMove:
        """The next action towards the goal, with its sub-goal as a thought."""
        held, goal = self._holding, self.goal
        if held is not None and type_of(held) != goal.object:
            places = self._order(type_of(held))
            if held in self._origin:
                places.insert(0, self._origin[held])
            return self._put(held, places, f"I do not need the {held}.")
        if goal.verb == "use":
            return self._take() if held is None else self._use()
        if held is None:
            return self._take()
        if goal.verb and goal.verb not in self._states.get(held, ()):
            station = self._all(STATIONS[goal.verb])[0]
            thought = f"Next I {goal.verb} the {goal.object} with the {type_of(station)}."
            return self._reach(station, thought) or ExpertMove(f"{goal.verb} {held} with {station}", thought)
        return self._put(
            held, [self._destination(), *self._all(goal.target)], f"Now I put the {goal.object} in the {goal.target}."
        )

    def _take(self) -> ExpertMove:
        goal = self.goal
        destination = "" if goal.verb == "use" else self._destination()
        for receptacle in [*self._beside, *self._contents]:
            for thing in self._contents.get(receptacle, ()):
                done = receptacle == destination and (not goal.verb or goal.verb in self._states.get(thing, ()))
                if type_of(thing) == goal.object and not done:
                    thought = f"I found the {goal.object}. I take it."
                    return self._open(receptacle, thought) or ExpertMove(f"take {thing} from {receptacle}", thought)
        another = goal.count == 2 and any(
            type_of(thing) == goal.object for thing in self._contents.get(destination, ())
        )
        return self._search(goal.object, "another" if another else _article(goal.object))

    def _use(self) -> ExpertMove:
        lamp = self.goal.target
        for receptacle in [*self._beside, *self._contents]:
            for thing in self._contents.get(receptacle, ()):
                if type_of(thing) == lamp:
                    thought = f"Now I look at the {self.goal.object} under the {lamp}."
                    return self._reach(receptacle, thought) or ExpertMove(f"use {thing}", thought)
        return self._search(lamp, "the")

    def _put(self, thing: str, places: Sequence[str], thought: str) -> ExpertMove:
        fit = [place for place in places if (thing, type_of(place)) not in self._refused]
        place = fit[0] if fit else places[0]
        return self._open(place, thought) or ExpertMove(f"move {thing} to {place}", thought)

    def _search(self, kind: str, article: str) -> ExpertMove:
        unseen = [name for name in self._order(kind) if name not in self._contents]
        if not unseen:  # it was overlooked or moved: look everywhere again
            self._contents.clear()
            unseen = self._order(kind)
        thought = f"I need to find {article} {kind}."
        return self._open(unseen[0], thought) or ExpertMove(f"examine {unseen[0]}", thought)

    def _reach(self, receptacle: str, thought: str) -> ExpertMove | None:
        """The move that brings ``receptacle`` within reach, or None when it is."""
        return None if receptacle in self._beside else ExpertMove(f"go to {receptacle}", thought)

    def _open(self, receptacle: str, thought: str) -> ExpertMove | None:
        """The move towards ``receptacle`` being within reach and not closed, or None when it is."""
        move = self._reach(receptacle, thought)
        if move is None and receptacle in self._closed:
            return ExpertMove(f"open {receptacle}", thought)
        return move

    def _destination(self) -> str:
        """The receptacle of the target type to fill: the one with most objects of the goal, then one that is near."""
        candidates = self._all(self.goal.target)
        return max(candidates, key=lambda name: (self._delivered(name), name in self._beside))

    def _delivered(self, receptacle: str) -> int:
        verb = self.goal.verb
        return sum(
            type_of(thing) == self.goal.object and (not verb or verb in self._states.get(thing, ()))
            for thing in self._contents.get(receptacle, ())
        )

    def _all(self, kind: str) -> list[str]:
        return search_order((name for name in self._receptacles if type_of(name) == kind), {})

    def _order(self, kind: str) -> list[str]:
        return search_order(self._receptacles, self._prior.get(kind, {}))


def _article(kind: str) -> str:
    return "an" if kind[0] in "aeiou" else "a"
