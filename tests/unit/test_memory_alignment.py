from __future__ import annotations

import pytest

from memory.alignment import align, find, lift_events, relevant
from memory.grammar import ActionGrammar
from memory.lifting import Run, read_runs
from memory.records import TraceStep, Trajectory

pytestmark = pytest.mark.unit

GRAMMAR = ActionGrammar(templates=("walk to {0}", "grab {0} off {1}", "rub {0} with {1}", "drop {0} into {1}", "look"))


def run(number: int, *steps: str, goal: str = "put a bright cup into a box", success: bool = True) -> Run:
    """``action | answer`` per step; no answer: one that repeats the action's names."""
    told = [step.partition(" | ") for step in steps]
    trajectory = Trajectory(
        source=f"test#{number}",
        world="w",
        grammar="g",
        task=str(number),
        task_type="brighten",
        goal=goal,
        success=success,
        steps=tuple(
            TraceStep(index=index, observation="", action=action, result=answer or f"Done: {action}.")
            for index, (action, _, answer) in enumerate(told)
        ),
    )
    return read_runs([trajectory], GRAMMAR, ("No.",))[0]


WHOLE = run(
    0,
    "walk to shelf 1",
    "look | A room.",
    "walk to shelf 2 | There is a cup 1.",
    "grab cup 1 off shelf 2",
    "walk to rag 1 | No.",
    "rub cup 1 with rag 1",
    "walk to box 1",
    "drop cup 1 into box 1",
)


def test_a_slice_drops_searching_and_refusals() -> None:
    assert [event.action for event in relevant(WHOLE.events, WHOLE.trajectory.goal)] == [
        "walk to shelf 2",
        "grab cup 1 off shelf 2",
        "rub cup 1 with rag 1",
        "walk to box 1",
        "drop cup 1 into box 1",
    ]


def test_a_slice_keeps_what_brought_a_name_into_view() -> None:
    told = run(0, "walk to shelf 1 | There is a rag 1.", "walk to door 1 | Nothing.", "rub cup 1 with rag 1", goal="")
    assert [event.action for event in relevant(told.events, "")] == ["walk to shelf 1", "rub cup 1 with rag 1"]


def test_a_look_that_shows_a_name_takes_along_what_led_there() -> None:
    told = run(
        0,
        "walk to yard 1 | Fine.",
        "walk to attic 1 | Fine.",
        "look | There is a cup 1.",
        "walk to rag 1 | Fine.",
        "rub cup 1 with rag 1",
        goal="",
    )
    assert [event.action for event in relevant(told.events, "")] == [
        "walk to attic 1",
        "look",
        "walk to rag 1",
        "rub cup 1 with rag 1",
    ]


def test_a_step_that_a_look_or_the_goal_explains_is_no_search() -> None:
    """Where the thing is found, and where it is brought to, differ each time and are named by no other step."""
    names = ("yard", "attic", "shed", "hall", "loft", "barn", "well", "gate")
    runs = [
        run(
            number,
            f"walk to {place} | Fine.",
            f"look | There is a cup {number}.",
            f"rub cup {number} with rag 1 | Fine.",
            f"walk to {names[-1 - number]} | Fine.",
            f"drop cup {number} into box 1 | Fine.",
            goal=f"bring a cup to the {names[-1 - number]}",
        )
        for number, place in enumerate(names)
    ]
    found = align(runs, "brighten", min_share=0.2, min_support=2, most=3)
    assert [(procedure.steps, procedure.goal) for procedure in found] == [
        (
            ("walk to {0}", "look", "rub cup {1} with rag 1", "walk to {2}", "drop cup {1} into box 1"),
            "bring a cup to the {2}",
        )
    ]


def test_a_repeated_block_counts_once() -> None:
    told = run(0, *["walk to cup 1", "rub cup 1 with rag 1"] * 3, "drop cup 1 into box 1")
    assert [event.action for event in relevant(told.events, "")] == [
        "walk to cup 1",
        "rub cup 1 with rag 1",
        "drop cup 1 into box 1",
    ]


def test_lifting_gives_equal_names_equal_slots() -> None:
    events = relevant(WHOLE.events, WHOLE.trajectory.goal)
    assert lift_events(events) == (
        ("walk to {0}", (0,)),
        ("grab {0} off {1}", (1, 0)),
        ("rub {0} with {1}", (1, 2)),
        ("walk to {0}", (3,)),
        ("drop {0} into {1}", (1, 3)),
    )


def test_find_binds_slots_one_to_one() -> None:
    sequence = (("grab {0} off {1}", (1, 0)), ("drop {0} into {1}", (1, 3)))
    found = find(sequence, WHOLE.events)
    assert found is not None
    events, names = found
    assert [event.step for event in events] == [3, 7]
    assert names == {0: "shelf 2", 1: "cup 1", 3: "box 1"}
    back = run(1, "grab cup 1 off box 1", "drop cup 1 into box 1")
    assert find(sequence, back.events) is None
    other = run(2, "grab cup 1 off box 1", "drop cup 2 into box 2")
    assert find(sequence, other.events) is None
    assert find((("grab {0} off {1}", (0, "box 1")),), other.events) is not None


def variant(number: int) -> Run:
    here, there = f"shelf {number % 3 + 1}", f"box {number % 2 + 1}"
    return run(
        number,
        f"walk to door {number}",
        f"walk to {here} | There is a cup {number}.",
        f"grab cup {number} off {here}",
        f"rub cup {number} with rag 1",
        f"walk to {there}",
        f"drop cup {number} into {there}",
    )


def test_procedures_name_what_hardly_varies_and_lift_the_goal() -> None:
    found = align([variant(number) for number in range(8)], "brighten", min_share=0.2, min_support=2, most=3)
    assert [procedure.steps for procedure in found] == [
        (
            "walk to shelf {0}",
            "grab cup {1} off shelf {0}",
            "rub cup {1} with rag 1",
            "walk to box {2}",
            "drop cup {1} into box {2}",
        )
    ]
    assert len(found[0].matches) == found[0].of == 8


def test_a_step_that_all_took_is_never_left_out() -> None:
    runs = [variant(number) for number in range(4)]
    # Half of them rub with what stands on the shelf that they grab from, so that no one longer sequence fits all.
    runs += [
        run(
            10 + number,
            f"walk to tap {number} | There is a mug {number}.",
            f"grab mug {number} off tap {number}",
            f"rub mug {number} with tap {number}",
            f"walk to tray {number}",
            f"drop mug {number} into tray {number}",
        )
        for number in range(4)
    ]
    found = align(runs, "brighten", min_share=0.2, min_support=2, most=3)
    assert len(found) == 2
    assert all(any(step.startswith("rub ") for step in procedure.steps) for procedure in found)


def test_failures_and_other_types_teach_no_procedure() -> None:
    failed = [run(number, "walk to box 1", "drop cup 1 into box 1", success=False) for number in range(5)]
    assert align(failed, "brighten", min_share=0.1, min_support=1, most=3) == []
    assert align([variant(0), variant(1)], "other", min_share=0.1, min_support=1, most=3) == []
    assert align([variant(0)], "brighten", min_share=0.1, min_support=2, most=3) == []


def test_a_detour_that_nothing_needed_drops_out() -> None:
    told = run(
        0,
        "walk to box 1 | Empty.",
        "walk to shelf 1 | There is a cup 1.",
        "grab cup 1 off shelf 1",
        "walk to box 1 | Empty.",
        "drop cup 1 into box 1",
    )
    assert [event.step for event in relevant(told.events, told.trajectory.goal)] == [1, 2, 3, 4]


def test_episodes_with_nothing_in_common_yield_no_empty_procedure() -> None:
    runs = [run(0, "walk to box 1"), run(1, "look | A room."), run(2, "grab cup 1 off box 1")]
    assert align(runs, "brighten", min_share=0.1, min_support=2, most=3) == []
