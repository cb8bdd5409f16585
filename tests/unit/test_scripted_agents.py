"""The scripted agent reads constraints and nothing else: what the memory benchmark rests on."""

import random

import pytest

from envs.alfworld_expert import NOTHING_HAPPENS
from tests.scripted_agents import Constraint, Past, match, read_constraints

pytestmark = pytest.mark.unit

TAKE = "When you are about to `take {0} from {1}`"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"- Rule (hypothesis): {TAKE}: do `go to {{1}}` first. Because …", ("first", ("go to {1}",))),
        (f"{TAKE}: do `open {{1}}` first, and not `close {{1}}` after it.", ("since", ("open {1}", "close {1}"))),
        (f"{TAKE}: do `go to {{1}}` first, as the latest of its kind. Except: x.", ("first", ("go to {1}",))),
        (f"{TAKE}: do `look` just before.", ("before", ("look",))),
        (f"{TAKE}: do not do it once `open {{1}}` has been done.", ("once", ("open {1}",))),
        (f"{TAKE} and {{1}} is a fridge: do not do it.", ("never", ())),
        (f"{TAKE}: do it only if {{0}} is in what you see now.", ("seen", ())),
        (f'{TAKE}: do it only if what you see does not say "The {{1}} is shut".', ("says not", ("The {1} is shut",))),
        ("When an action was refused: do something else first, not the same action again.", ("again", ())),
    ],
)  # fmt: skip
def test_constraints_are_read(text: str, expected: tuple[str, tuple[str, ...]]) -> None:
    (constraint,) = read_constraints(text)
    assert (constraint.kind, constraint.others) == expected
    # the same words in another order say nothing
    words = text.split()
    for seed in range(20):
        random.Random(seed).shuffle(words)
        if read_constraints(" ".join(words)) == [constraint]:
            pytest.fail(f"read from {' '.join(words)}")


def test_what_says_nothing_is_passed_over() -> None:
    assert read_constraints("From earlier games. When it rains: stay at home. When you see a fridge, be glad.") == []


def past(*played: tuple[str, str], observation: str = "") -> Past:
    return Past(list(played), observation)


OPENED = ("open box 1", "It is open.")
CLOSED = ("close box 1", "It is closed.")
REFUSED = ("open box 1", NOTHING_HAPPENS)


@pytest.mark.parametrize(
    ("constraint", "before", "broken"),
    [
        (Constraint("take {0} from {1}", "first", ("open {1}",)), past(), True),
        (Constraint("take {0} from {1}", "first", ("open {1}",)), past(OPENED), False),
        (Constraint("take {0} from {1}", "first", ("open {1}",)), past(REFUSED), True),
        (Constraint("take {0} from {1}", "first", ("open {0}",)), past(OPENED), True),
        (Constraint("take {0} from {1}", "since", ("open {1}", "close {1}")), past(OPENED, CLOSED), True),
        (Constraint("take {0} from {1}", "since", ("open {1}", "close {1}")), past(CLOSED, OPENED), False),
        (Constraint("take {0} from {1}", "before", ("open …",)), past(OPENED), False),
        (Constraint("take {0} from {1}", "before", ("open …",)), past(OPENED, CLOSED), True),
        (Constraint("take {0} from {1}", "once", ("open {1}",)), past(OPENED), True),
        (Constraint("take {0} from {1}", "never", (), 1, "box"), past(), True),
        (Constraint("take {0} from {1}", "never", (), 1, "bag"), past(), False),
        (Constraint("open {0}", "never"), past(), False),
        (Constraint("take {0} from {1}", "seen", (), 0), past(OPENED), True),
        (Constraint("take {0} from {1}", "seen", (), 0), past(observation="A pen 1."), False),
        (
            Constraint("take {0} from {1}", "says not", ("The {1} is shut",)),
            past(observation="The box 1 is shut."),
            True,
        ),
        (Constraint("take {0} from {1}", "says", ("The {1} is shut",)), past(observation="The box 1 is shut."), False),
        (Constraint("", "again"), past(("take pen 1 from box 1", NOTHING_HAPPENS)), True),
        (Constraint("", "again"), past(("take pen 1 from box 1", NOTHING_HAPPENS), OPENED), False),
    ],
)
def test_a_constraint_speaks_against_an_action_or_not(constraint: Constraint, before: Past, broken: bool) -> None:
    assert constraint.broken("take pen 1 from box 1", before) is broken


def test_what_is_asked_for_is_done_instead() -> None:
    assert Constraint("take {0} from {1}", "first", ("go to {1}",)).instead("take pen 1 from box 1") == "go to box 1"
    assert Constraint("take {0} from {1}", "first", ("open …",)).instead("take pen 1 from box 1") == "look"
    assert Constraint("", "again").instead("take pen 1 from box 1") == "look"
    assert match("take {0} from {1}", "take pen 1") is None
