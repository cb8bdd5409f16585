"""The search expert: goals, search order, and what it makes of observations, its own and others'."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.alfworld_expert import Goal, SearchExpert, count_prior, parse_goal, search_order
from envs.base import ExpertMove

pytestmark = pytest.mark.unit

PLACE, LIGHT, TWO = "pick_and_place_simple", "look_at_obj_in_light", "pick_two_obj_and_place"
CLEAN, HEAT, COOL = (f"pick_{verb}_then_place_in_recep" for verb in ("clean", "heat", "cool"))

ROOM = (
    "You are in the middle of a room. Looking quickly around you, you see a cabinet 2, a cabinet 1, a countertop 1, "
    "a fridge 1, a microwave 1, and a sinkbasin 1.\n\nYour task is to: "
)
PRIOR = {"mug": {"countertop": 3.0, "cabinet": 2.0}}
REFUSED = "Nothing happens."


def expert(goal: str, *played: tuple[str, str]) -> SearchExpert:
    agent = SearchExpert(ROOM + goal, PRIOR)
    for action, observation in played:
        agent.observe(action, observation)
    return agent


FOUND = ("go to countertop 1", "You arrive at countertop 1. On the countertop 1, you see a apple 1, and a mug 2.")
EMPTY = ("go to countertop 1", "You arrive at countertop 1. On the countertop 1, you see nothing.")
TAKEN = ("take mug 2 from countertop 1", "You pick up the mug 2 from the countertop 1.")
AT_CABINET = ("go to cabinet 1", "You arrive at cabinet 1. The cabinet 1 is closed.")
OPENED = ("open cabinet 1", "You open the cabinet 1. The cabinet 1 is open. In it, you see nothing.")


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("put some spraybottle on toilet.", Goal(PLACE, "spraybottle", "toilet", "", 1)),
        ("put a book in sofa.", Goal(PLACE, "book", "sofa", "", 1)),
        ("look at alarmclock under the desklamp.", Goal(LIGHT, "alarmclock", "desklamp", "use", 1)),
        ("examine the pen with the desklamp.", Goal(LIGHT, "pen", "desklamp", "use", 1)),
        ("put a clean mug in cabinet.", Goal(CLEAN, "mug", "cabinet", "clean", 1)),
        ("clean some potato and put it in microwave.", Goal(CLEAN, "potato", "microwave", "clean", 1)),
        ("put a hot cup in countertop.", Goal(HEAT, "cup", "countertop", "heat", 1)),
        ("heat some apple and put it in fridge.", Goal(HEAT, "apple", "fridge", "heat", 1)),
        ("put a cool pan in stoveburner.", Goal(COOL, "pan", "stoveburner", "cool", 1)),
        ("cool some tomato and put it in diningtable.", Goal(COOL, "tomato", "diningtable", "cool", 1)),
        ("put two pen in drawer.", Goal(TWO, "pen", "drawer", "", 2)),
        ("find two tissuebox and put them in drawer.", Goal(TWO, "tissuebox", "drawer", "", 2)),
    ],
)
def test_goals(text: str, goal: Goal) -> None:
    assert parse_goal(text) == goal


def test_unknown_goal_is_named() -> None:
    with pytest.raises(ValueError, match=r"goal: 'dance\.' is none of ALFWorld's templates"):
        parse_goal("dance.")


def test_search_order_spreads_a_types_weight_over_its_receptacles() -> None:
    rooms = ["drawer 10", "drawer 2", "drawer 1", "shelf 1", "bed 1", "armchair 1"]
    # drawers 3/3 = 1 each, shelf 2, the others 0: by type
    assert search_order(rooms, {"drawer": 3.0, "shelf": 2.0}) == [
        *("shelf 1", "drawer 1", "drawer 2", "drawer 10"),
        *("armchair 1", "bed 1"),
    ]


def test_count_prior() -> None:
    walkthroughs = [
        ["go to desk 1", "take pen 2 from desk 1", "go to shelf 3", "use desklamp 1"],
        ["go to bed 1", "take pen 1 from bed 1", "go to drawer 6", "open drawer 6", "move pen 1 to drawer 6"],
        ["go to desk 2", "take pen 1 from desk 2"],
    ]
    assert count_prior(walkthroughs) == {"desklamp": {"shelf": 1.0}, "pen": {"bed": 1.0, "desk": 2.0}}


def test_first_observation_without_room_or_task() -> None:
    with pytest.raises(ValueError, match="first_observation: no receptacles or no 'Your task is to: '"):
        SearchExpert("Your task is to: put a mug in cabinet.", PRIOR)
    with pytest.raises(ValueError, match="first_observation: no receptacles or no 'Your task is to: '"):
        SearchExpert("you see a cabinet 1.", PRIOR)


def test_a_whole_episode() -> None:
    agent = expert("put a clean mug in cabinet.")
    script = [
        (ExpertMove("go to countertop 1", "I need to find a mug."), EMPTY[1]),
        (ExpertMove("go to cabinet 1", "I need to find a mug."), AT_CABINET[1]),
        (ExpertMove("open cabinet 1", "I need to find a mug."), OPENED[1]),
        (ExpertMove("go to cabinet 2", "I need to find a mug."), "You arrive at cabinet 2. The cabinet 2 is closed."),
        (
            ExpertMove("open cabinet 2", "I need to find a mug."),
            "You open the cabinet 2. The cabinet 2 is open. In it, you see a mug 1.",
        ),
        (
            ExpertMove("take mug 1 from cabinet 2", "I found the mug. I take it."),
            "You pick up the mug 1 from the cabinet 2.",
        ),
        (
            ExpertMove("go to sinkbasin 1", "Next I clean the mug with the sinkbasin."),
            "You arrive at sinkbasin 1. On the sinkbasin 1, you see nothing.",
        ),
        (
            ExpertMove("clean mug 1 with sinkbasin 1", "Next I clean the mug with the sinkbasin."),
            "You clean the mug 1 using the sinkbasin 1.",
        ),
        (
            ExpertMove("go to cabinet 1", "Now I put the mug in the cabinet."),
            "You arrive at cabinet 1. The cabinet 1 is open. In it, you see nothing.",
        ),
        (
            ExpertMove("move mug 1 to cabinet 1", "Now I put the mug in the cabinet."),
            "You move the mug 1 to the cabinet 1.",
        ),
    ]
    for move, observation in script:
        assert agent.move() == move
        agent.observe(move.action, observation)


def test_foreign_invalid_actions_change_nothing() -> None:
    agent = expert("put a mug in cabinet.", FOUND)
    for action in ("go to shelf 9", "take mug 9 from shelf 9", "", "dance", "move mug 2 to cabinet 1", "open fridge 1"):
        agent.observe(action, REFUSED)
        assert agent.move().action == "take mug 2 from countertop 1"


def test_a_refused_go_means_the_place_is_within_reach() -> None:
    agent = expert("put a mug in cabinet.", EMPTY, AT_CABINET, OPENED)
    assert agent.move().action == "go to cabinet 2"
    agent.observe("go to cabinet 2", REFUSED)
    assert agent.move().action == "examine cabinet 2"
    agent.observe("examine cabinet 2", "The cabinet 2 is closed.")
    assert agent.move().action == "open cabinet 2"


def test_look_tells_what_is_within_reach() -> None:
    agent = expert("put a mug in cabinet.", FOUND, TAKEN)
    agent.observe("look", "You are facing the cabinet 2, and cabinet 1. Next to it, you see nothing.")
    assert agent.move().action == "move mug 2 to cabinet 1"


def test_a_wrong_object_goes_back_where_it_came_from() -> None:
    agent = expert(
        "put a mug in cabinet.",
        FOUND,
        ("take apple 1 from countertop 1", "You pick up the apple 1 from the countertop 1."),
        AT_CABINET,
    )
    assert agent.move() == ExpertMove("go to countertop 1", "I do not need the apple 1.")


def test_what_a_type_of_receptacle_refuses_is_put_elsewhere() -> None:
    agent = SearchExpert(ROOM + "put a mug in cabinet.", {"apple": {"cabinet": 2.0, "fridge": 1.0}})
    for action, observation in [
        ("inventory", "You are carrying: a apple 1."),
        AT_CABINET,
        OPENED,
        ("move apple 1 to cabinet 1", REFUSED),
    ]:
        agent.observe(action, observation)
    assert agent.move().action == "go to fridge 1"


def test_a_closed_door_is_opened_again() -> None:
    agent = expert(
        "put a mug in cabinet.", FOUND, TAKEN, AT_CABINET, OPENED, ("close cabinet 1", "You close the cabinet 1.")
    )
    assert agent.move().action == "open cabinet 1"


def test_heat_undone_by_another_is_done_again() -> None:
    agent = expert("put a hot mug in cabinet.", FOUND, TAKEN, ("go to microwave 1", "You arrive at microwave 1."))
    assert agent.move().action == "heat mug 2 with microwave 1"
    agent.observe("heat mug 2 with microwave 1", "You heat the mug 2 using the microwave 1.")
    assert agent.move().action == "go to cabinet 1"
    agent.observe("cool mug 2 with fridge 1", "You cool the mug 2 using the fridge 1.")
    assert agent.move().action == "heat mug 2 with microwave 1"


def test_inventory_corrects_the_belief_about_the_hand() -> None:
    agent = expert("put a mug in cabinet.", FOUND, TAKEN)
    agent.observe("inventory", "You are not carrying anything.")
    assert agent.move().action == "go to cabinet 1"  # the countertop was left without a mug: it searches on
    agent.observe("inventory", "You are carrying: a mug 2.")
    assert agent.move().thought == "Now I put the mug in the cabinet."


def test_a_wrong_object_of_unknown_origin_is_put_down_where_it_belongs() -> None:
    agent = SearchExpert(ROOM + "put a mug in cabinet.", {**PRIOR, "apple": {"fridge": 1.0}})
    agent.observe("inventory", "You are carrying: a apple 1.")
    assert agent.move().action == "go to fridge 1"


def test_two_objects_go_to_the_same_receptacle() -> None:
    agent = expert(
        "put two mug in cabinet.",
        ("go to countertop 1", "You arrive at countertop 1. On the countertop 1, you see a mug 2, and a mug 1."),
        TAKEN,
        ("go to cabinet 2", "You arrive at cabinet 2. The cabinet 2 is open. In it, you see nothing."),
        ("move mug 2 to cabinet 2", "You move the mug 2 to the cabinet 2."),
    )
    assert agent.move().action == "go to countertop 1"
    agent.observe(*FOUND[:1], "You arrive at countertop 1. On the countertop 1, you see a mug 1.")
    assert agent.move().action == "take mug 1 from countertop 1"
    agent.observe("take mug 1 from countertop 1", "You pick up the mug 1 from the countertop 1.")
    assert agent.move().action == "go to cabinet 2"


def test_lamp_seen_on_the_way_is_used() -> None:
    agent = SearchExpert(
        "you see a bed 1, a desk 1, and a shelf 1.\n\nYour task is to: look at pen under the desklamp.",
        {"pen": {"desk": 2.0, "shelf": 1.0}},
    )
    agent.observe("go to desk 1", "You arrive at desk 1. On the desk 1, you see a desklamp 1.")
    agent.observe("go to shelf 1", "You arrive at shelf 1. On the shelf 1, you see a pen 1.")
    agent.observe("take pen 1 from shelf 1", "You pick up the pen 1 from the shelf 1.")
    assert agent.move().action == "go to desk 1"
    agent.observe("go to desk 1", "You arrive at desk 1. On the desk 1, you see a desklamp 1.")
    assert agent.move() == ExpertMove("use desklamp 1", "Now I look at the pen under the desklamp.")


def test_when_all_places_were_seen_it_begins_again() -> None:
    agent = expert("put a mug in cabinet.")
    visited = []
    for _ in range(6):
        move = agent.move()
        place = move.action.removeprefix("go to ")
        visited.append(place)
        agent.observe(move.action, f"You arrive at {place}. On the {place}, you see nothing.")
    assert sorted(visited) == ["cabinet 1", "cabinet 2", "countertop 1", "fridge 1", "microwave 1", "sinkbasin 1"]
    assert agent.move().action == "go to countertop 1"


_WORDS = st.sampled_from(
    [*("go to", "take", "move", "open", "mug 2", "apple 1", "cabinet 1", "shelf 9", "from", "to", "you see a"), ""]
)
_TEXT = st.one_of(
    st.text(max_size=30),
    st.lists(_WORDS, max_size=6).map(" ".join),
    st.sampled_from([REFUSED, *(step[i] for step in (FOUND, TAKEN, AT_CABINET, OPENED) for i in (0, 1))]),
)


@given(st.lists(st.tuples(_TEXT, _TEXT), max_size=12))
def test_any_history_leaves_a_move_and_asking_twice_gives_the_same(played: list[tuple[str, str]]) -> None:
    agent = expert("put a hot mug in cabinet.", *played)
    move = agent.move()
    assert move.action.split(" ")[0] in {"go", "take", "move", "open", "heat", "examine"}
    assert agent.move() == move
