"""Which commands reach a Z-machine game, and how its answers are read."""

import pytest

pytest.importorskip("jericho")

from envs import jericho

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "command", ["quit", "QUIT", "look. quit", "take all then save", "restarting", "tw-print", "undo"]
)
def test_commands_to_the_interpreter_are_refused(command: str) -> None:
    assert jericho._is_meta(command)


@pytest.mark.parametrize(
    "command", ["", "look", "again", "help midget", "look. take lamp", "tell man to quit", "quiet"]
)
def test_commands_to_the_game_pass(command: str) -> None:
    assert not jericho._is_meta(command)


def test_no_walkthrough_of_a_known_game_is_refused() -> None:
    from jericho.defines import BINDINGS_DICT

    commands = [c for game in BINDINGS_DICT.values() for c in game.get("walkthrough", "").split("/")]
    assert len(commands) > 10_000
    assert [command for command in commands if jericho._is_meta(command)] == []


def test_an_action_is_one_line_of_ascii() -> None:
    assert jericho._one_line("  open\nthe  caf\u00e9 door\t") == "open the caf door"


def test_prompt_and_status_line_are_cut_off() -> None:
    assert (
        jericho._text("\nYou see a lamp.\n> x\nIt is lit.\n\n>       -= Hall =-0/1")
        == "You see a lamp.\n> x\nIt is lit."
    )


@pytest.mark.parametrize(
    ("answer", "understood"),
    [
        ("You can't go that way.", True),
        ("Taken.", True),
        ("\nThat's not a verb I recognise.\n", False),
        ("You can't see any such thing.", False),
        ("I beg your pardon?", False),
        ("I didn't understand that sentence.", False),
        ("I only understood you as far as wanting to take.", False),
    ],
)
def test_the_parser_decides_validity(answer: str, understood: bool) -> None:
    assert jericho._understood(answer) is understood
