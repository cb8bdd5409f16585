"""Generated households: endless solvable games of ALFWorld's six task types in ALFWorld's own domain and grammar.

``generate(difficulty, seed)`` writes a game as an official ``game.tw-pddl`` holds it, the same text for the same seed
on every machine. Rooms, furniture and what lies where follow the small tables below, which are a subset of what the
alfworld package allows. A game is drawn so that an agent that looks in the most plausible places first finds its object
at a place number that the difficulty fixes, and finishes within the difficulty's number of steps.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from envs.alfworld_data import TASK_TYPES
from envs.alfworld_expert import NOTHING_HAPPENS, STATIONS, Goal, SearchExpert, search_order, type_of
from envs.base import EnvFault, ExpertMove, StepResult, Task, TaskError, TextEnv

TRAIN_SEEDS = range(1_000_000)
EVAL_SEEDS = range(1_000_000, 2_000_000)


@dataclass(frozen=True)
class Difficulty:
    """How hard a household is. Pairs are (least, most), both possible.

    ``receptacles``: pieces of furniture to look into; ``distractors``: objects that the goal does not name; ``copies``:
    more objects of the goal's type than it needs, in less plausible places; ``searched``: places that a search in order
    of plausibility visits until it sees what it looks for; ``expert_steps``: the search expert wins within so many
    steps, always.
    """

    receptacles: tuple[int, int]
    distractors: tuple[int, int]
    copies: tuple[int, int]
    searched: tuple[int, int]
    expert_steps: int


DIFFICULTIES = {
    "easy": Difficulty(receptacles=(4, 6), distractors=(1, 3), copies=(0, 0), searched=(1, 2), expert_steps=8),
    "medium": Difficulty(receptacles=(12, 16), distractors=(10, 16), copies=(0, 1), searched=(1, 6), expert_steps=20),
    "hard": Difficulty(receptacles=(18, 30), distractors=(20, 40), copies=(0, 2), searched=(2, 15), expert_steps=50),
}

_PHRASES = {
    "pick_and_place_simple": ("put a {object} in {target}.", "put some {object} on {target}."),
    "look_at_obj_in_light": ("look at {object} under the {target}.", "examine the {object} with the {target}."),
    "pick_clean_then_place_in_recep": (
        "put a clean {object} in {target}.",
        "clean some {object} and put it in {target}.",
    ),
    "pick_heat_then_place_in_recep": ("put a hot {object} in {target}.", "heat some {object} and put it in {target}."),
    "pick_cool_then_place_in_recep": ("put a cool {object} in {target}.", "cool some {object} and put it in {target}."),
    "pick_two_obj_and_place": ("put two {object} in {target}.", "find two {object} and put them in {target}."),
}
_VERBS = {
    "look_at_obj_in_light": "use",
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
}


@dataclass(frozen=True)
class _Room:
    """``fixed``: furniture that is always there; ``more``: (type, how many more of it there may be)."""

    fixed: tuple[str, ...]
    more: tuple[tuple[str, int], ...]
    objects: tuple[str, ...]


_ROOMS = {
    "kitchen": _Room(
        ("CounterTop", "Fridge", "Microwave", "SinkBasin"),
        (
            ("Cabinet", 9),
            ("CoffeeMachine", 1),
            ("CounterTop", 2),
            ("DiningTable", 1),
            ("Drawer", 7),
            ("GarbageCan", 1),
            ("Shelf", 2),
            ("StoveBurner", 4),
        ),
        (
            *("Apple", "Bowl", "Bread", "ButterKnife", "Cup", "DishSponge", "Egg", "Fork", "Kettle", "Knife", "Ladle"),
            *("Lettuce", "Mug", "Pan", "PepperShaker", "Plate", "Pot", "Potato", "SaltShaker", "SoapBottle", "Spatula"),
            *("Spoon", "Tomato", "WineBottle"),
        ),
    ),
    "bedroom": _Room(
        ("Bed", "Desk", "SideTable"),
        (
            ("ArmChair", 1),
            ("Cabinet", 2),
            ("Drawer", 9),
            ("Dresser", 1),
            ("GarbageCan", 1),
            ("Safe", 1),
            ("Shelf", 6),
            ("SideTable", 1),
        ),
        (
            *("AlarmClock", "Book", "Bowl", "CD", "CellPhone", "CreditCard", "KeyChain", "Laptop", "Mug", "Pen"),
            *("Pencil", "Pillow", "TissueBox", "Watch"),
        ),
    ),
    "living room": _Room(
        ("CoffeeTable", "SideTable", "Sofa"),
        (
            ("ArmChair", 2),
            ("Cabinet", 3),
            ("DiningTable", 1),
            ("Drawer", 8),
            ("Dresser", 1),
            ("GarbageCan", 1),
            ("Safe", 1),
            ("Shelf", 5),
            ("SideTable", 1),
        ),
        (
            *("Book", "CellPhone", "CreditCard", "KeyChain", "Laptop", "Newspaper", "Pillow", "RemoteControl"),
            *("Statue", "TissueBox", "Vase", "Watch", "WateringCan"),
        ),
    ),
    "bathroom": _Room(
        ("CounterTop", "SinkBasin", "Toilet"),
        (
            ("BathtubBasin", 1),
            ("Cabinet", 6),
            ("Drawer", 5),
            ("GarbageCan", 1),
            ("HandTowelHolder", 2),
            ("Shelf", 3),
            ("SideTable", 1),
            ("SinkBasin", 1),
            ("ToiletPaperHanger", 1),
        ),
        ("Candle", "Cloth", "HandTowel", "SoapBar", "SoapBottle", "SprayBottle", "TissueBox", "ToiletPaper"),
    ),
}
_ROOMS_OF = {
    "pick_and_place_simple": ("kitchen", "bedroom", "living room", "bathroom"),
    "look_at_obj_in_light": ("bedroom", "living room"),
    "pick_clean_then_place_in_recep": ("kitchen", "bathroom"),
    "pick_heat_then_place_in_recep": ("kitchen",),
    "pick_cool_then_place_in_recep": ("kitchen",),
    "pick_two_obj_and_place": ("kitchen", "bedroom", "living room", "bathroom"),
}

PLACES = {
    "AlarmClock": {"Desk": 5, "Dresser": 3, "Shelf": 2, "SideTable": 4},
    "Apple": {"CounterTop": 5, "DiningTable": 4, "Fridge": 2, "GarbageCan": 2, "Microwave": 1, "SinkBasin": 2},
    "Book": {"ArmChair": 1, "Bed": 5, "CoffeeTable": 3, "Desk": 4, "Dresser": 2, "Drawer": 1, "Shelf": 2, "Sofa": 2},
    "Bowl": {"Cabinet": 4, "CounterTop": 4, "Desk": 3, "DiningTable": 3, "Dresser": 2, "Fridge": 1, "Shelf": 3},
    "Bread": {"CounterTop": 5, "DiningTable": 4, "Fridge": 2, "Microwave": 1},
    "ButterKnife": {"CounterTop": 4, "DiningTable": 3, "Drawer": 3, "SinkBasin": 1},
    "CD": {"Desk": 4, "Drawer": 3, "Dresser": 3, "GarbageCan": 1, "Safe": 1, "Shelf": 2, "SideTable": 3},
    "Candle": {"Cabinet": 1, "CounterTop": 4, "Drawer": 1, "Shelf": 2, "SideTable": 2, "Toilet": 4},
    "CellPhone": {"Bed": 4, "CoffeeTable": 3, "Desk": 3, "Drawer": 2, "Dresser": 2, "SideTable": 2, "Sofa": 2},
    "Cloth": {"BathtubBasin": 3, "Cabinet": 2, "CounterTop": 4, "Drawer": 2, "SinkBasin": 1, "Toilet": 1},
    "CreditCard": {"ArmChair": 1, "CoffeeTable": 4, "Desk": 3, "Drawer": 2, "Dresser": 3, "SideTable": 4, "Sofa": 2},
    "Cup": {"Cabinet": 3, "CounterTop": 5, "DiningTable": 3, "Fridge": 2, "Microwave": 1, "Shelf": 1, "SinkBasin": 2},
    "DeskLamp": {"CoffeeTable": 1, "Desk": 4, "Dresser": 3, "Shelf": 1, "SideTable": 4},
    "DishSponge": {"Cabinet": 1, "CounterTop": 4, "Drawer": 2, "GarbageCan": 1, "SinkBasin": 3},
    "Egg": {"CounterTop": 4, "DiningTable": 2, "Fridge": 4, "GarbageCan": 1, "Microwave": 1, "SinkBasin": 2},
    "Fork": {"CounterTop": 4, "DiningTable": 3, "Drawer": 4, "SinkBasin": 1},
    "HandTowel": {"CounterTop": 2, "Drawer": 1, "HandTowelHolder": 5, "SinkBasin": 1},
    "Kettle": {"Cabinet": 2, "CounterTop": 3, "DiningTable": 1, "Shelf": 1, "StoveBurner": 5},
    "KeyChain": {"ArmChair": 2, "CoffeeTable": 3, "Desk": 2, "Drawer": 2, "Dresser": 3, "Safe": 1, "SideTable": 4},
    "Knife": {"CounterTop": 5, "DiningTable": 4, "Drawer": 2, "SinkBasin": 1},
    "Ladle": {"Cabinet": 2, "CounterTop": 4, "DiningTable": 3, "Drawer": 2},
    "Laptop": {"ArmChair": 1, "Bed": 5, "CoffeeTable": 2, "Desk": 4, "DiningTable": 2, "Dresser": 1, "Sofa": 3},
    "Lettuce": {"CounterTop": 4, "DiningTable": 4, "Fridge": 3, "GarbageCan": 1, "SinkBasin": 1},
    "Mug": {"Cabinet": 3, "CoffeeMachine": 3, "CounterTop": 5, "Desk": 3, "DiningTable": 2, "Dresser": 1, "Shelf": 2},
    "Newspaper": {"ArmChair": 2, "CoffeeTable": 4, "Drawer": 1, "Dresser": 2, "SideTable": 4, "Sofa": 3},
    "Pan": {"Cabinet": 2, "CounterTop": 3, "DiningTable": 1, "Fridge": 1, "SinkBasin": 1, "StoveBurner": 6},
    "Pen": {"Desk": 5, "Drawer": 3, "Dresser": 2, "GarbageCan": 1, "Shelf": 2, "SideTable": 3},
    "Pencil": {"Desk": 5, "Drawer": 3, "Dresser": 3, "GarbageCan": 1, "Shelf": 2, "SideTable": 3},
    "PepperShaker": {"Cabinet": 3, "CounterTop": 4, "DiningTable": 3, "Drawer": 2, "Shelf": 1},
    "Pillow": {"ArmChair": 2, "Bed": 5, "Sofa": 4},
    "Plate": {"Cabinet": 3, "CounterTop": 4, "DiningTable": 4, "Fridge": 1, "Microwave": 1, "Shelf": 2, "SinkBasin": 2},
    "Pot": {"Cabinet": 1, "CounterTop": 3, "DiningTable": 1, "Fridge": 1, "SinkBasin": 1, "StoveBurner": 6},
    "Potato": {"CounterTop": 5, "DiningTable": 3, "Fridge": 1, "GarbageCan": 2, "Microwave": 2, "SinkBasin": 2},
    "RemoteControl": {"ArmChair": 2, "CoffeeTable": 5, "Drawer": 1, "Dresser": 1, "SideTable": 3, "Sofa": 4},
    "SaltShaker": {"Cabinet": 3, "CounterTop": 4, "DiningTable": 3, "Drawer": 2, "Shelf": 1},
    "SoapBar": {"BathtubBasin": 3, "Cabinet": 1, "CounterTop": 4, "Drawer": 1, "GarbageCan": 1, "Toilet": 3},
    "SoapBottle": {"Cabinet": 3, "CounterTop": 5, "Drawer": 1, "GarbageCan": 1, "Shelf": 2, "Toilet": 3},
    "Spatula": {"CounterTop": 4, "DiningTable": 2, "Drawer": 3, "SinkBasin": 1},
    "Spoon": {"CounterTop": 4, "DiningTable": 3, "Drawer": 4, "SinkBasin": 1},
    "SprayBottle": {"Cabinet": 2, "CounterTop": 4, "Drawer": 1, "GarbageCan": 1, "Shelf": 2, "Toilet": 4},
    "Statue": {"CoffeeTable": 4, "DiningTable": 3, "Dresser": 3, "Safe": 1, "Shelf": 3, "SideTable": 3},
    "TissueBox": {"Cabinet": 1, "CoffeeTable": 3, "CounterTop": 3, "Desk": 2, "Drawer": 2, "Shelf": 2, "SideTable": 3},
    "ToiletPaper": {"Cabinet": 2, "CounterTop": 3, "Drawer": 1, "GarbageCan": 1, "Toilet": 3, "ToiletPaperHanger": 4},
    "Tomato": {"CounterTop": 5, "DiningTable": 4, "Fridge": 2, "GarbageCan": 1, "Microwave": 1, "SinkBasin": 1},
    "Vase": {"CoffeeTable": 2, "DiningTable": 2, "Dresser": 3, "Safe": 1, "Shelf": 4, "SideTable": 2},
    "Watch": {"CoffeeTable": 3, "Desk": 2, "DiningTable": 2, "Drawer": 2, "Dresser": 2, "Safe": 1, "SideTable": 4},
    "WateringCan": {"Cabinet": 1, "CoffeeTable": 4, "DiningTable": 2, "Drawer": 1, "Shelf": 3, "SideTable": 2},
    "WineBottle": {"Cabinet": 2, "CounterTop": 4, "DiningTable": 4, "Fridge": 3, "GarbageCan": 1},
}
"""Where an object type may be, and how likely that is (relative weights); also what a receptacle takes."""

OPENABLE = ("Cabinet", "Drawer", "Fridge", "Microwave", "Safe")
CLEANABLE = (
    *("Apple", "Bowl", "ButterKnife", "Cloth", "Cup", "DishSponge", "Egg", "Fork", "Kettle", "Knife", "Ladle"),
    *("Lettuce", "Mug", "Pan", "Plate", "Pot", "Potato", "SoapBar", "Spatula", "Spoon", "Tomato"),
)
HEATABLE = ("Apple", "Bread", "Cup", "Egg", "Mug", "Plate", "Potato", "Tomato")
COOLABLE = (
    *("Apple", "Bowl", "Bread", "Cup", "Egg", "Lettuce", "Mug", "Pan", "Plate", "Pot", "Potato", "Tomato"),
    "WineBottle",
)
SLICEABLE = ("Apple", "Bread", "Egg", "Lettuce", "Potato", "Tomato")
_LAMP = "DeskLamp"
_VESSELS = ("Bowl", "Cup", "Mug", "Pan", "Plate", "Pot")
_FIT_FOR = {"": tuple(PLACES), "use": tuple(PLACES), "clean": CLEANABLE, "heat": HEATABLE, "cool": COOLABLE}
_DOMAIN_TYPES = {"rtype": ("Fridge", "Microwave", "SinkBasin"), "otype": ("ButterKnife", "Knife")}
"""Types that the domain's actions name, so every problem must declare them."""

PRIOR = {
    kind.lower(): {place.lower(): float(weight) for place, weight in places.items()} for kind, places in PLACES.items()
}
"""PLACES in the words of the text, as the search expert takes it."""

_CAMEL = {name.lower(): name for places in PLACES.values() for name in places} | {name.lower(): name for name in PLACES}


def household_task(difficulty: str, seed: int) -> Task:
    """The task of a generated game, without generating it.

    Raises:
        TaskError: an unknown difficulty, or a seed outside both seed ranges.
    """
    if difficulty not in DIFFICULTIES:
        raise TaskError(f"difficulty: {difficulty!r} is unknown; choose {', '.join(DIFFICULTIES)}")
    if seed not in TRAIN_SEEDS and seed not in EVAL_SEEDS:
        raise TaskError(f"household seed: {seed} is out of range; give 0 to {EVAL_SEEDS[-1]}")
    return Task("household", f"{difficulty}/{seed}", TASK_TYPES[seed % len(TASK_TYPES)])


def generate(difficulty: str, seed: int) -> str:
    """The game as the JSON text of a ``game.tw-pddl`` (domain, grammar, problem, walkthrough); same seed, same text.

    Raises:
        TaskError: as :func:`household_task`, or the alfworld package is not installed.
    """
    task = household_task(difficulty, seed)
    rng = random.Random(f"household/{task.id}")
    scene = None
    while scene is None:
        scene = _draw(rng, task.type, DIFFICULTIES[difficulty])
    goal = scene.goal
    phrase = rng.choice(_PHRASES[task.type]).format(object=goal.object, target=goal.target)
    game = {
        "pddl_domain": _package_text("alfred.pddl"),
        "grammar": _package_text("alfred.twl2").replace("UNKNOWN GOAL.", phrase),
        "pddl_problem": _problem(scene, f"{difficulty}_{seed}"),
        "solvable": True,
        "walkthrough": _walkthrough(scene),
    }
    return json.dumps(game, indent=1)


# ---- What is where


@dataclass(frozen=True)
class _Scene:
    """A furnished room and its task, in the words of the text: ``{"mug 1": "cabinet 2"}``.

    ``wanted``: the objects that the walkthrough uses, in the order in which a search meets them.
    """

    receptacles: tuple[str, ...]
    places: dict[str, str]
    goal: Goal
    wanted: tuple[str, ...]


def _draw(rng: random.Random, task_type: str, level: Difficulty) -> _Scene | None:
    """A scene at random, or None when what was drawn does not suit the level."""
    room = _ROOMS[rng.choice(_ROOMS_OF[task_type])]
    receptacles = _furnish(rng, room, rng.randint(*level.receptacles))
    present = {_CAMEL[type_of(name)] for name in receptacles}
    verb = _VERBS.get(task_type, "")
    kind = rng.choice([name for name in room.objects if name in _FIT_FOR[verb]])
    targets = [_LAMP] if verb == "use" else [name for name in PLACES[kind] if name in present]
    if not targets:
        return None
    goal = Goal(
        task_type, kind.lower(), rng.choice(targets).lower(), verb, 2 if task_type == "pick_two_obj_and_place" else 1
    )

    likely = [name for name in search_order(receptacles, PRIOR[goal.object]) if type_of(name) in PRIOR[goal.object]]
    least, most = level.searched
    spots = [name for name in likely[least - 1 : most] if type_of(name) != goal.target]
    if not spots:
        return None
    found = sorted((rng.choice(spots) for _ in range(goal.count)), key=likely.index)
    later = [name for name in likely[likely.index(found[-1]) + 1 :] if type_of(name) != goal.target]
    copies = rng.randint(*level.copies) if later else 0
    placed = [(goal.object, place) for place in [*found, *(rng.choice(later) for _ in range(copies))]]
    if verb == "use":
        placed.append((goal.target, _place(rng, _LAMP, receptacles)))
    others = [name for name in room.objects if name != kind and present & PLACES[name].keys()]
    for _ in range(rng.randint(*level.distractors)):
        other = rng.choice(others)
        placed.append((other.lower(), _place(rng, other, receptacles)))
    rng.shuffle(placed)

    places = _number(placed)
    suited = [thing for thing in places if type_of(thing) == goal.object]
    wanted = tuple(sorted(suited, key=lambda thing: likely.index(places[thing]))[: goal.count])
    scene = _Scene(tuple(receptacles), places, goal, wanted)
    return scene if _steps_of_search(scene) <= level.expert_steps else None


def _furnish(rng: random.Random, room: _Room, size: int) -> list[str]:
    stock = [kind for kind, count in room.more for _ in range(count)]
    extra = rng.sample(stock, min(size - len(room.fixed), len(stock)))
    return list(_number((kind.lower(), "") for kind in sorted([*room.fixed, *extra])))


def _number(items: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Name the items of each type "mug 1", "mug 2" … in the order given."""
    count: dict[str, int] = {}
    named = {}
    for kind, place in items:
        count[kind] = count.get(kind, 0) + 1
        named[f"{kind} {count[kind]}"] = place
    return named


def _place(rng: random.Random, kind: str, receptacles: list[str]) -> str:
    weights = PRIOR[kind.lower()]
    fit = sorted({type_of(name) for name in receptacles} & weights.keys())
    chosen = rng.choices(fit, [weights[name] for name in fit])[0]
    return rng.choice([name for name in receptacles if type_of(name) == chosen])


# ---- Solutions


def _visit(receptacle: str) -> int:
    """Steps to go to a receptacle and look into it."""
    return 2 if _CAMEL[type_of(receptacle)] in OPENABLE else 1


def _steps_of_search(scene: _Scene) -> int:
    """Steps that the search expert needs at most, visiting places in order of plausibility."""
    goal, places = scene.goal, scene.places
    order = search_order(scene.receptacles, PRIOR[goal.object])
    seen = order[: order.index(places[scene.wanted[-1]]) + 1]
    steps = sum(map(_visit, seen)) + goal.count  # find, take
    if goal.verb == "use":
        lamp = places[f"{goal.target} 1"]
        if lamp in seen:
            return steps + 2  # go to it, use it
        by_lamp = search_order(scene.receptacles, PRIOR[goal.target])
        return steps + sum(_visit(name) for name in by_lamp[: by_lamp.index(lamp) + 1] if name not in seen) + 1
    if goal.verb:
        steps += 2  # go to the station, use it
    steps += _visit(f"{goal.target} 1") + 1  # bring it
    if goal.count == 2:
        steps += 2  # go there again with the second one, put it down
        if places[scene.wanted[0]] == places[scene.wanted[1]]:
            steps += 1  # go back for it
    return steps


def _walkthrough(scene: _Scene) -> list[str]:
    """The shortest solution for one who knows where everything is, like the walkthroughs of official games."""
    goal = scene.goal
    actions: list[str] = []
    here = ""
    opened: set[str] = set()

    def go(receptacle: str, *, look_inside: bool) -> None:
        nonlocal here
        if here != receptacle:
            actions.append(f"go to {receptacle}")
            here = receptacle
        if look_inside and _visit(receptacle) == 2 and receptacle not in opened:
            actions.append(f"open {receptacle}")
            opened.add(receptacle)

    for thing in scene.wanted:
        go(scene.places[thing], look_inside=True)
        actions.append(f"take {thing} from {here}")
        if goal.verb == "use":
            go(scene.places[f"{goal.target} 1"], look_inside=False)
            actions.append(f"use {goal.target} 1")
            continue
        if goal.verb:
            go(f"{STATIONS[goal.verb]} 1", look_inside=False)
            actions.append(f"{goal.verb} {thing} with {here}")
        go(f"{goal.target} 1", look_inside=True)
        actions.append(f"move {thing} to {here}")
    return actions


# ---- PDDL


def _problem(scene: _Scene, name: str) -> str:
    """The scene as a PDDL problem of ALFWorld's domain."""
    receptacles = _ids(scene.receptacles)
    things = _ids(scene.places)
    locations = {receptacle: f"loc_bar_{index}" for index, receptacle in enumerate(scene.receptacles, start=1)}
    rtypes = sorted({_CAMEL[type_of(item)] for item in receptacles} | set(_DOMAIN_TYPES["rtype"]))
    otypes = sorted({_CAMEL[type_of(item)] for item in things} | set(_DOMAIN_TYPES["otype"]))
    objects = [
        "agent1 - agent",
        *(f"{kind}Type - otype" for kind in otypes),
        *(f"{kind}Type - rtype" for kind in rtypes),
        *(f"{item} - object" for item in things.values()),
        *(f"{item} - receptacle" for item in receptacles.values()),
        *(f"{item} - location" for item in ("loc_bar_0", *locations.values())),
    ]
    facts = ["atLocation agent1 loc_bar_0"]
    facts += [f"canContain {place}Type {kind}Type" for kind in otypes for place in rtypes if place in PLACES[kind]]
    for receptacle, item in receptacles.items():
        kind = _CAMEL[type_of(receptacle)]
        facts += [f"receptacleType {item} {kind}Type", f"receptacleAtLocation {item} {locations[receptacle]}"]
        if kind in OPENABLE:
            facts.append(f"openable {item}")
    for thing, item in things.items():
        kind, place = _CAMEL[type_of(thing)], scene.places[thing]
        facts += [f"objectType {item} {kind}Type", f"inReceptacle {item} {receptacles[place]}"]
        facts.append(f"objectAtLocation {item} {locations[place]}")
        facts += [f"{trait} {item}" for trait in _traits(kind)]
    lines = "\n        "
    return (
        f"(define (problem household_{name})\n(:domain alfred)\n"
        f"(:objects{lines}{lines.join(objects)}\n)\n"
        f"(:init{lines}{lines.join(f'({fact})' for fact in facts)}\n)\n{_goal(scene.goal)})\n"
    )


def _ids(names: Iterable[str]) -> dict[str, str]:
    """Name -> PDDL object that ALFWorld's engine shows under that name: it numbers each type from the last id down."""
    count: dict[str, int] = {}
    numbered = [(name, *name.split(" ")) for name in names]
    for _, kind, _ in numbered:
        count[kind] = count.get(kind, 0) + 1
    return {name: _id(_CAMEL[kind], count[kind] - int(number) + 1) for name, kind, number in numbered}


def _id(kind: str, index: int) -> str:
    stem = kind.removesuffix("Basin")
    return f"{stem}_bar_{index:02d}" + (f"_bar_{kind}" if stem != kind else "")


def _traits(kind: str) -> Iterator[str]:
    if kind == _LAMP:
        yield "toggleable"
        return
    yield "pickupable"
    for trait, kinds in (
        ("isReceptacleObject", _VESSELS),
        ("cleanable", CLEANABLE),
        ("heatable", HEATABLE),
        ("coolable", COOLABLE),
        ("sliceable", SLICEABLE),
    ):
        if kind in kinds:
            yield trait


def _goal(goal: Goal) -> str:
    """ALFWorld's goal formulas (alfworld.gen.goal_library)."""
    kind, target = f"{_CAMEL[goal.object]}Type", f"{_CAMEL[goal.target]}Type"
    if goal.verb == "use":
        return f"""(:goal (and
    (exists (?ot - object ?r - receptacle ?a - agent ?l - location)
        (and (objectType ?ot {target}) (toggleable ?ot) (isToggled ?ot)
             (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?ot ?r)))
    (exists (?o - object ?a - agent)
        (and (objectType ?o {kind}) (holds ?a ?o)))
))
"""
    if goal.count == 2:
        return f"""(:goal (and
    (exists (?r - receptacle)
        (exists (?o1 - object)
            (and (objectType ?o1 {kind}) (receptacleType ?r {target}) (inReceptacle ?o1 ?r)
                 (exists (?o2 - object)
                     (and (not (= ?o1 ?o2))
                          (objectType ?o2 {kind}) (receptacleType ?r {target}) (inReceptacle ?o2 ?r))))))
))
"""
    state = {
        "": "",
        "clean": "(cleanable ?o) (isClean ?o) ",
        "heat": "(heatable ?o) (isHot ?o) ",
        "cool": "(coolable ?o) (isCool ?o) ",
    }[goal.verb]
    return f"""(:goal (and
    (exists (?r - receptacle)
        (exists (?o - object)
            (and {state}(inReceptacle ?o ?r) (objectType ?o {kind}) (receptacleType ?r {target}))))
))
"""


def _package_text(name: str) -> str:
    """A data file of the alfworld package, without importing the package (which sets environment variables)."""
    spec = importlib.util.find_spec("alfworld")
    if spec is None or not spec.submodule_search_locations:
        raise TaskError("household: the alfworld package is not installed; pip install 'saga-agents[alfworld]'")
    return (Path(spec.submodule_search_locations[0]) / "data" / name).read_text()


# ---- The environment


class HouseholdEnv(TextEnv):
    """Generated households in ALFWorld's engine. Task ids are ``<difficulty>/<seed>``; ``reset``'s seed is not used.

    Args:
        max_steps: step cap.
    """

    expert_steps: int | None = None
    """Length of the stored walkthrough of the present game (a known solution, for SPL)."""

    def __init__(self, max_steps: int) -> None:
        super().__init__(max_steps)
        from envs.alfworld_engine import AlfworldEngine

        self._engine = AlfworldEngine()
        self._expert: SearchExpert | None = None

    def _reset(self, task: Task, seed: int) -> StepResult:
        text = generate(*_split(task))
        if task.sha256 is not None and task.sha256 != (found := hashlib.sha256(text.encode()).hexdigest()):
            raise TaskError(
                f"task {task.id!r}: the generated game has sha256 {found}, not {task.sha256}: the generator or the "
                "alfworld package changed since the set was frozen; use the versions that it was frozen with"
            )
        with tempfile.NamedTemporaryFile("w", prefix="household-", suffix=".tw-pddl") as file:
            file.write(text)
            file.flush()
            self._engine.load(Path(file.name))
        banner_and_room = self._engine.reset()
        opening = banner_and_room[banner_and_room.index("You are ") :]
        self.expert_steps = len(self._engine.walkthrough)
        self._expert = SearchExpert(opening, PRIOR)
        goal = opening.partition("Your task is to: ")[2]
        return StepResult(opening, goal=goal, inventory=self._engine.inventory)

    def _step(self, action: str) -> StepResult:
        observation = self._engine.step(action)
        if self._expert is not None:
            self._expert.observe(action, observation)
        won = self._engine.won
        valid = observation != NOTHING_HAPPENS
        return StepResult(
            observation, score=float(won), done=won, won=won, valid=valid, inventory=self._engine.inventory
        )

    def admissible(self) -> list[str]:
        return self._engine.admissible

    def expert(self) -> ExpertMove:
        """The search expert's move: it knows only what was shown, and how plausible places are (PRIOR)."""
        if self._expert is None:
            raise EnvFault("expert: no game is running; call reset first")
        return self._expert.move()

    def close(self) -> None:
        self._engine.close()


def _split(task: Task) -> tuple[str, int]:
    difficulty, _, seed = task.id.partition("/")
    if not seed.isdigit():
        raise TaskError(f"task {task.id!r}: not a household; its id is <difficulty>/<seed>, for example easy/17")
    return difficulty, int(seed)
