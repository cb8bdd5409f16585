"""The deterministic summariser in a made-up workshop: names are learnt, and replaced by roles."""

from __future__ import annotations

import pytest

from memory.records import TraceStep, Trajectory
from memory.summary import Tracker, Words, condense, situation

pytestmark = pytest.mark.unit

OPENING = "You are in a workshop with a bench 1, a bench 2, a kiln 1 and a shelf 1. Your task: bring a cup to a shelf."
PLAYED = [
    ("walk to bench 1", "On it lie a cup 2 and a nail 1."),
    ("grab cup 2 off bench 1", "You hold it: cup 2."),
    ("grab nail 1 off bench 1", "You hold it: nail 1."),
    ("walk to kiln 1", "It is hot."),
    ("fire cup 2 in kiln 1", "The cup 2 is fired."),
    ("walk to shelf 1", "On it lies a cup 1."),
    ("lay cup 2 on shelf 1", "The cup 2 is laid down."),
    ("walk to bench 2", "There is nothing."),
]
PLACES = ("bench 1", "bench 2", "kiln 1", "shelf 1")
THINGS = ("cup 1", "cup 2", "nail 1")
OFFERED = (
    *(f"grab {thing} off {place}" for thing in THINGS for place in PLACES),
    *(f"lay {thing} on {place}" for thing in THINGS for place in PLACES),
    *(f"fire {thing} in kiln 1" for thing in THINGS),
    *(f"walk to {place}" for place in PLACES),
    "polish cup 1",
)


def workshop(**changes: object) -> Trajectory:
    observations = [OPENING, *(answer for _, answer in PLAYED)]
    steps = tuple(
        TraceStep(index=n, observation=observations[n], action=action, result=answer, valid=True, admissible=OFFERED)
        for n, (action, answer) in enumerate(PLAYED)
    )
    base = Trajectory(
        source="made up", world="workshop", grammar="w", task="1", goal="bring a cup to a shelf.", steps=steps
    )
    return base.model_copy(update=changes)


WORDS = Words.learn([workshop()])


def test_words_are_learnt_from_actions() -> None:
    assert WORDS.kinds == ("bench", "cup", "kiln", "nail", "shelf")
    assert WORDS.names_in("A cup 2, a kiln, a gizmo 3 and a kilnman") == ["cup 2", "kiln", "gizmo 3"]
    assert Words().names_in("A gizmo 3 and a kiln") == ["gizmo 3"]


def test_refused_actions_teach_no_words() -> None:
    made_up = TraceStep(index=8, observation="o", action="paint gizmo on easel", result="No.", valid=False)
    assert Words.learn([workshop(steps=(*workshop().steps, made_up))]) == WORDS


def test_what_few_kinds_take_part_in_is_special() -> None:
    assert WORDS.specialities == {"kiln": "fire something in it"}
    assert WORDS.special("fire something in it", fixed=True)
    assert not WORDS.special("lay something on it", fixed=True)
    assert WORDS.special("polish it", fixed=False)
    assert Words().joined(WORDS) == WORDS


def test_thoughts_with_letters_hold_for_other_things() -> None:
    told = Tracker(WORDS, "bring a cup to a shelf.", OPENING).lettered("The cup 2 off bench 1, a cupboard, to shelf 1.")
    assert told == "The Y off bench 1, a cupboard, to Z."
    assert (
        Tracker(WORDS, "bring a nail to a kiln.", OPENING).named(told) == "The nail off bench 1, a cupboard, to kiln."
    )


def test_an_episode_in_states_and_lifted_actions() -> None:
    found = condense(workshop(), WORDS, "state", lift=True)
    assert found.lifted == (
        "walk to a new place",
        "grab Y off here",
        "grab something off here",
        "walk to a new place (fire something in it)",
        "fire used Y in here",
        "walk to a new Z",
        "lay used Y on this Z",
        "walk to a new place",
    )
    task = "Task: bring a Y to a Z"
    fired = "Handled: 1 Y. Done with Y: fire Y in something"
    assert [state.removeprefix(f"{task}. ") for state in states_told(workshop())] == [
        "Place: start",
        "Place: bench. Here: Y",
        "Place: bench. Handled: 1 Y",
        "Place: bench. Handled: 1 Y",
        "Place: kiln. Handled: 1 Y",
        f"Place: kiln. {fired}",
        f"Place: Z. Here: Y. {fired}",
        f"Place: Z. Here: Y. {fired}",
    ]
    # Where the options are known, they tell what can be done at a place, and the state does not.
    assert found.states[1] == "Task: bring Y Z. Holding: nothing. At hand: polish Y"
    put = "Y: lay Y on Z. Done with Y: fire Y in something"
    assert found.states[7] == f"Task: bring Y Z. Holding: nothing. At hand: polish Y. {put}"
    assert found.options[0][:2] == ("grab Y off a new place", "grab Y off a new place (fire something in it)")


def test_what_was_taken_and_can_be_acted_on_anywhere_is_held() -> None:
    tracker = Tracker(WORDS, "bring a cup to a shelf.", OPENING)
    tracker.played(*PLAYED[0], True)
    assert tracker.summary(["polish cup 1"]) == "Task: bring Y Z. Holding: nothing. At hand: polish Y"
    tracker.played(*PLAYED[1], True)
    assert tracker.summary(["polish cup 2"]) == "Task: bring Y Z. Holding: Y"
    tracker.played("lay cup 2 on bench 1", "Done.", True)
    tracker.played(*PLAYED[2], True)
    held = "Task: bring Y Z. Holding: something. Y: lay Y on something"
    assert tracker.summary(["polish nail 1"]) == held
    assert tracker.summary(["walk to kiln 1"]) == held.replace("something. Y", "nothing. Y")


def test_phrasings_of_one_kind_of_task_are_one_and_words_shared_with_actions_are_acts() -> None:
    states = set()
    for goal in ("fire a cup and bring it to a shelf.", "bring to the shelf some cup: fire that."):
        tracker = Tracker(WORDS, goal, OPENING)
        states.add(tracker.summary([]).replace("Y", "A").replace("Z", "A"))
        assert tracker.lift("fire cup 2 in kiln 1") == f"ACT {tracker.role('cup 2')} in {tracker.role('kiln 1')}"
        assert tracker.role("kiln 1") == "a new place (ACT something in it)"
        assert tracker.named("ACT it") == "fire it"
    assert states == {"Task: ACT bring A A. Holding: nothing"}
    tracker.played(*PLAYED[3], True)
    tracker.played(*PLAYED[4], True)
    assert tracker.summary(["polish cup 2"]).endswith("Done with Z: ACT Z in something")
    assert tracker.summary().endswith("Done with Z: fire Z in something")


def test_a_place_is_told_by_what_could_be_done_with_it_when_it_was_left() -> None:
    forms = [(name, "walk to it") for name in ("bench", "kiln", "shelf")]
    words = Words(kinds=WORDS.kinds, forms=(*forms, ("kiln", "open it"), ("kiln", "shut it")))
    tracker = Tracker(words, "bring a cup to a shelf.", OPENING)
    assert tracker.role("kiln 1") == "a new place (open it)"
    tracker.played("walk to kiln 1", "It is shut.", True)
    tracker.summary(["open kiln 1", "walk to bench 1"])
    tracker.played("open kiln 1", "It is open.", True)
    tracker.summary(["shut kiln 1", "walk to bench 1"])
    tracker.played("walk to bench 1", "There is nothing.", True)
    assert tracker.role("kiln 1") == "a used place (shut it)"


def test_states_of_several_tasks_have_their_situation_in_common() -> None:
    state = "Task: bring a Y to a Z. At hand: nothing. Handled: 1 Y. Done with Y: fire Y in something"
    assert situation(state) == "At hand: nothing. Handled: 1 Y. Done with Y"
    assert situation("Task: bring a Y to a Z") == ""


def states_told(of: Trajectory) -> tuple[str, ...]:
    """Without the admissible actions."""
    bare = tuple(step.model_copy(update={"admissible": None}) for step in of.steps)
    return condense(of.model_copy(update={"steps": bare}), WORDS, "state", lift=False).states


def test_what_was_seen_elsewhere_gives_a_place_its_role() -> None:
    tracker = Tracker(WORDS, "bring a cup to a shelf.", OPENING)
    for action, answer in (PLAYED[0], PLAYED[7]):
        tracker.played(action, answer, True)
    assert tracker.role("bench 1") == "a place with Y"
    assert tracker.role("bench 2") == "here"
    assert tracker.role("kiln 1") == "a new place (fire something in it)"
    assert tracker.role("shelf 1") == "a new Z"
    assert tracker.summary() == "Task: bring a Y to a Z. Place: bench. Elsewhere: Y"
    tracker.played("grab cup 9 off bench 2", "No.", False)
    assert tracker.summary().endswith("Elsewhere: Y. Last action refused")
    tracker.played(*PLAYED[0], True)
    tracker.played(*PLAYED[1], True)
    tracker.played(*PLAYED[5], True)
    assert tracker.role("bench 1") == "a used place"  # the cup is gone from there
    assert tracker.role("cup 2") == "used Y"
    tracker.played("grab cup 1 off shelf 1", "You hold it: cup 1.", True)
    assert "Handled: 2 Y" in tracker.summary()
    assert tracker.named(tracker.summary()).startswith("Task: bring a cup to a shelf. Place: shelf")


def test_coarser_states() -> None:
    assert set(condense(workshop(), WORDS, "task", lift=False).states) == {"Task: bring Y Z"}
    scenes = condense(workshop(), WORDS, "scene", lift=False).states
    assert scenes[3] == scenes[2]
    assert not any("Done" in state for state in scenes)


def test_actions_as_they_are() -> None:
    found = condense(workshop(), WORDS, "state", lift=False)
    assert found.lifted == tuple(action for action, _ in PLAYED)
    assert found.options[0] == OFFERED


def test_steps_without_an_action_and_empty_episodes() -> None:
    [first, *_] = workshop().steps
    none = first.model_copy(update={"action": None, "admissible": None})
    found = condense(workshop(steps=(none, first)), WORDS, "state", lift=True)
    assert found.lifted[0] == ""
    assert "Last action refused" in found.states[1]
    assert condense(workshop(steps=()), WORDS, "state", lift=True).states == ()
