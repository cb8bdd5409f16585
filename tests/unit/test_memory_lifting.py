from __future__ import annotations

import pytest

from memory.grammar import ActionGrammar
from memory.lifting import learn_refusals, lift, mentions, read_runs
from memory.records import TraceStep, Trajectory

pytestmark = pytest.mark.unit

GRAMMAR = ActionGrammar(templates=("walk to {0}", "open {0}", "grab {0}", "rub {0}", "look"))


def trajectory(*steps: tuple[str | None, str], success: bool = False, valid: bool | None = None) -> Trajectory:
    return Trajectory(
        source="test#1",
        world="w",
        grammar="g",
        task="t",
        success=success,
        steps=tuple(
            TraceStep(index=number, observation="", action=action, result=result, valid=valid)
            for number, (action, result) in enumerate(steps)
        ),
    )


def test_one_answer_to_many_forms_is_a_refusal() -> None:
    told = trajectory(
        ("walk to box 1", "No."),
        ("open box 2", "No."),
        ("grab cup 1", "No."),
        ("grab cup 2", "No."),
        ("rub cup 3", "No."),
        ("walk to box 3", "You reach the box 3."),
    )
    assert learn_refusals([told], GRAMMAR) == ("No.",)


def test_an_answer_to_all_that_succeeds_is_none() -> None:
    steps = [(f"{verb} cup {number}", "OK.") for verb in ("open", "grab", "rub") for number in (1, 2)]
    assert learn_refusals([trajectory(*steps, success=True)], GRAMMAR) == ()


def test_an_answer_that_names_the_thing_is_an_effect() -> None:
    steps = [(f"{verb} cup", "The cup is fine.") for verb in ("open", "grab", "rub", "walk to")]
    steps += [(f"{verb} box", "The box is fine.") for verb in ("open", "grab", "rub", "walk to")]
    assert learn_refusals([trajectory(*steps)], GRAMMAR) == ()


def test_the_same_again_and_again_is_a_refusal_of_one_form() -> None:
    steps = [(f"walk to box {number}", "No way there.") for number in (1, 1, 2, 2, 3, 4, 5)]
    assert learn_refusals([trajectory(*steps)], GRAMMAR) == ("No way there.",)
    assert learn_refusals([trajectory(*steps[::2])], GRAMMAR) == ()


def test_what_the_world_flags_counts() -> None:
    flagged = trajectory(("grab cup 1", "Eh?"), ("grab cup 2", "Eh?"), valid=False)
    assert learn_refusals([flagged], GRAMMAR) == ("Eh?",)
    run = read_runs([flagged], GRAMMAR, ())[0]
    assert [event.refused for event in run.events] == [True, True]


def test_events_change_something_once() -> None:
    told = trajectory(
        ("look", "A room."),
        ("look", "A room."),
        ("open box 1", "It is open."),
        ("look", "A room."),
        (None, ""),
        ("grab cup 1", "No."),
    )
    run = read_runs([told], GRAMMAR, ("No.",))[0]
    assert [(event.step, event.verb, event.args) for event in run.events] == [
        (0, "look", ()),
        (1, "look", ()),
        (2, "open {0}", ("box 1",)),
        (3, "look", ()),
        (5, "grab {0}", ("cup 1",)),
    ]
    assert [event.changed for event in run.events] == [True, False, True, True, False]
    assert [event.refused for event in run.events] == [False, False, False, False, True]


def test_lifting_replaces_whole_words_longest_first() -> None:
    assert lift("The cup 11 is near cup 1.", ["cup 1"]) == "The cup 11 is near {0}."
    assert lift("Cup 1 on tray cup 1 2", ["cup 1", "tray cup 1 2"]) == "{0} on {1}"
    assert mentions("the Cup 1.", "cup 1")
    assert not mentions("the teacup 1", "cup 1")
