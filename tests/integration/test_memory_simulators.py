"""The offline builder on episodes of an expert who makes mistakes, played in the real simulators: what a person who
knows the games would call right."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from envs.tasksets import load_task_set, per_type
from memory.audit import audit
from memory.offline import Built, build
from memory.predicates import PredicateHost
from memory.records import PrincipleItem, ProcedureItem, Trajectory
from tests.stumbling import stumble

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def host() -> Iterator[PredicateHost]:
    with PredicateHost() as host:
        yield host


@pytest.fixture(scope="module")
def alfworld() -> list[Trajectory]:
    """Official training games, twelve of each type."""
    pytest.importorskip("alfworld")
    from envs.alfworld import AlfworldEnv
    from envs.alfworld_data import data_folder

    if "ALFWORLD_DATA" not in os.environ or not (data_folder() / "json_2.1.1" / "train").is_dir():
        pytest.skip("ALFWORLD_DATA names no folder with training games")
    env = AlfworldEnv(max_steps=20)
    tasks = per_type(load_task_set("alfworld/train", {"name": "alfworld"}), 12)
    told = [stumble(env, task, number) for number, task in enumerate(tasks)]
    env.close()
    return told


@pytest.fixture(scope="module")
def scienceworld() -> list[Trajectory]:
    """Training variations of three tasks, twenty-five of each."""
    pytest.importorskip("scienceworld")
    from envs.scienceworld import ScienceWorldEnv

    types = ("find-living-thing", "find-non-living-thing", "find-plant")
    tasks = [task for task in load_task_set("scienceworld/train", {"name": "scienceworld"}) if task.type in types]
    env = ScienceWorldEnv(max_steps=16)
    told = [stumble(env, task, number) for number, task in enumerate(per_type(tasks, 25))]
    env.close()
    return told


def steps(built: Built, task_type: str) -> tuple[str, ...]:
    """The procedure of ``task_type`` that explains most."""
    return next(item.steps for item in built.items if isinstance(item, ProcedureItem) and item.task_type == task_type)


def principles(built: Built) -> dict[str, PrincipleItem]:
    return {item.id: item for item in built.items if isinstance(item, PrincipleItem)}


def said(built: Built) -> set[tuple[str, str]]:
    return {(item.condition, item.guidance) for item in principles(built).values()}


def test_procedures_of_alfworld(alfworld: list[Trajectory]) -> None:
    built = build(alfworld)
    fetch, bring = ("go to {0}", "take {1} from {0}"), ("go to {2}", "move {1} to {2}")
    assert steps(built, "pick_and_place_simple") == (*fetch, *bring)
    for verb, station in (("clean", "sinkbasin 1"), ("cool", "fridge 1"), ("heat", "microwave 1")):
        made_ready = (f"go to {station}", f"{verb} {{1}} with {station}")
        assert steps(built, f"pick_{verb}_then_place_in_recep") == (*fetch, *made_ready, *bring)
    assert steps(built, "look_at_obj_in_light") == (*fetch, "go to {2}", "use desklamp 1")
    two = steps(built, "pick_two_obj_and_place")
    assert [step.split(" {")[0] for step in two] == ["go to", "take", "go to", "move"] * 2
    assert two[:4] == (*fetch, *bring)
    assert two[6] == "go to {2}"  # the second one is brought to the same place


def test_principles_of_alfworld_pass_the_audit(alfworld: list[Trajectory], host: PredicateHost) -> None:
    built = build(alfworld)
    take, move = "you are about to `take {0} from {1}`", "you are about to `move {0} to {1}`"
    assert said(built) >= {
        ("an action was refused", "do something else first, not the same action again"),
        ("you are about to `go to {0}`", 'do it only if what you see does not say "You arrive at {0}"'),
        (take, "do `go to {1}` first, as the latest of its kind"),
        (move, "do `take {0} from …` first"),
        (move, "do `go to {1}` first, as the latest of its kind"),
    }
    audits = audit(principles(built), alfworld, built.grammar.parse, host)
    assert [one.reason for one in audits.values() if one.decision == "failed"] == []
    assert sum(one.decision == "passed" for one in audits.values()) >= 4


def test_procedures_of_scienceworld(scienceworld: list[Trajectory]) -> None:
    """That it is the kitchen or the red box may be, as in most of these variations, part of the procedure."""
    built = build(scienceworld)
    assert steps(built, "find-non-living-thing")[:3] == ("go to {0}", "look around", "focus on {1}")
    assert steps(built, "find-non-living-thing")[3].startswith("move {1} to ")
    living = steps(built, "find-living-thing")
    assert living[:4] == ("go to outside", "look around", "focus on {0}", "pick up {0}")
    assert [step.split()[0] for step in living[4:]] == ["go", "move"]


def test_nothing_false_passes_the_audit_of_scienceworld(scienceworld: list[Trajectory], host: PredicateHost) -> None:
    """Mistakes cost little there, so little can be shown; what is merely idle (all doors are open) stays allowed."""
    built = build(scienceworld)
    audits = audit(principles(built), scienceworld, built.grammar.parse, host)
    passed = {principles(built)[id].guidance for id, one in audits.items() if one.decision == "passed"}
    assert passed <= {"do something else first, not the same action again"}
    assert not any("open door" in item.guidance for item in principles(built).values())
