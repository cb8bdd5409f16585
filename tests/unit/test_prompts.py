import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.prompts import admissible_suffix, parse_reply, reply_text, system_prompt, thin

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Action: go to desk 1", (None, "go to desk 1")),
        ("Thought: I need a mug.\nAction: take mug 1 from desk 1", ("I need a mug.", "take mug 1 from desk 1")),
        ("thought: a\nb\naction:  look \nAction: open fridge 1", ("a\nb", "look")),
        ("go to desk 1", (None, None)),
        ("Action:", (None, None)),
        ("Action:   \n", (None, None)),
        ("Thought: what now", ("what now", None)),
        ("Thought:\nAction: look", (None, "look")),
        ("Sure! Action: look", (None, None)),
        ("", (None, None)),
    ],
)
def test_parse_reply(text: str, expected: tuple[str | None, str | None]) -> None:
    assert parse_reply(text) == expected


line = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1)


@given(action=line, thought=st.none() | line)
def test_a_reply_reads_back(action: str, thought: str | None) -> None:
    assert parse_reply(reply_text(action, thought)) == (thought, action)


@given(st.text())
def test_any_model_output_parses(text: str) -> None:
    thought, action = parse_reply(text)
    assert action is None or (action == action.strip() and action)
    assert thought is None or thought


def test_thin_keeps_order_and_spread() -> None:
    assert thin(list("abcdefghij"), 4) == ["a", "c", "f", "h"]
    assert thin(["a"], 4) == ["a"]


def test_prompt_says_the_form() -> None:
    assert "Thought:" in system_prompt("household", thoughts=True)
    assert "Thought:" not in system_prompt("household", thoughts=False)
    assert admissible_suffix(["look", "go to desk 1"]) == "\nAdmissible actions: look; go to desk 1"
    assert admissible_suffix(None) == ""
