from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.builder_settings import LanguageModelSettings
from memory.instantiate import (
    LONGEST_CONSTRAINT,
    Situation,
    instantiate_by_builder,
    instantiate_offline,
    instantiation_prompt,
    parse_instantiation,
)
from memory.language_model import LanguageModel, LanguageModelFault
from memory.records import PrincipleItem
from tests.scripted_server import Reply, ScriptedServer

pytestmark = pytest.mark.unit


def principle(**fields: object) -> PrincipleItem:
    base = {"world": "w", "grammar": "g", "condition": "you want to take something", "guidance": "open the box first"}
    return PrincipleItem.model_validate(base | fields)


SITUATION = Situation(
    goal="put a hot mug in cabinet.", observation="You see a fridge 1, a microwave 12, a stove.", task_type="heat"
)
NAMES = {"mug": 0.5, "fridge": 1.0, "microwave": 1.0, "cabinet": 1.0, "safe": 0.9, "vault": 0.8}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("Constraint: open fridge 1 before you take from it", "open fridge 1 before you take from it"),
        ("Sure.\nConstraint:  go to desk 1. \nConstraint: two", "go to desk 1."),
        ("**Constraint:** heat the mug first", "heat the mug first"),
        ("- constraint: x", "x"),
    ],
)
def test_a_constraint_is_read(answer: str, text: str) -> None:
    made = parse_instantiation("r-1", answer)
    assert (made.text, made.reason, made.suppressed) == (text, "", False)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("suppress: there is no fridge", "there is no fridge"),
        ("Suppressed: not here\nConstraint: open it", "not here"),
        ("", "unparsable answer: ''"),
        ("Constraint:", "unparsable answer: 'Constraint:'"),
        ("Suppress: ", "unparsable answer: 'Suppress:'"),
        ("Action: open fridge 1", "unparsable answer: 'Action: open fridge 1'"),
        ("a\n" * 300, "unparsable answer: '" + "a " * 99 + "a…'"),
        (
            "Constraint: " + "x" * (LONGEST_CONSTRAINT + 1),
            f"constraint of {LONGEST_CONSTRAINT + 1} characters, over 300",
        ),
    ],
)
def test_anything_else_is_suppressed_with_the_reason(answer: str, reason: str) -> None:
    made = parse_instantiation("r-1", answer)
    assert made.suppressed
    assert made.reason == reason


@given(st.text())
def test_any_answer_gives_a_constraint_or_a_reason(answer: str) -> None:
    made = parse_instantiation("r-1", answer)
    assert bool(made.text) != bool(made.reason)
    assert "\n" not in made.text


def test_the_prompt_holds_situation_and_rule() -> None:
    prompt = instantiation_prompt(principle(scope="boxes"), Situation("win", "A room.", plan="I look."))
    assert prompt == (
        "Task: win\nYou see: A room.\nPlan: I look.\n"
        "Rule: When you want to take something: open the box first.\nScope of the rule: boxes\nConstraint or Suppress?"
    )


@pytest.mark.parametrize(
    ("reply", "text", "reason"),
    [
        (Reply('{"applies": true, "text": "open box 1\\nfirst"}'), "open box 1 first", ""),
        (Reply('{"applies": false, "text": "no box"}'), "", "no box"),
        (Reply('{"applies": true, "text": ""}'), "", "unparsable answer: 'Constraint:'"),
        (Reply("I think so."), "", "model 'm': no usable answer in 1"),
    ],
)
def test_the_builder_answers_in_json(tmp_path: Path, reply: Reply, text: str, reason: str) -> None:
    with ScriptedServer(lambda body: reply) as server:
        model = LanguageModel(LanguageModelSettings(url=server.url, model="m", reasks=0), tmp_path)
        made = instantiate_by_builder(model, principle(), SITUATION)
        model.close()
    assert (made.text, made.reason[: len(reason)]) == (text, reason)
    ((_, body),) = server.requests
    assert "take precedence" in body["messages"][0]["content"]
    assert "Rule: When you want to take something" in body["messages"][1]["content"]
    assert made.suppressed == bool(reason)


def test_a_builder_that_is_spent_suppresses_and_one_that_is_gone_is_a_fault(tmp_path: Path) -> None:
    settings = LanguageModelSettings(url="http://127.0.0.1:9", model="m", max_calls=1, tries=1)
    model = LanguageModel(settings, tmp_path)
    with pytest.raises(LanguageModelFault):
        instantiate_by_builder(model, principle(), SITUATION)
    made = instantiate_by_builder(
        LanguageModel(settings.model_copy(update={"max_calls": 0}), tmp_path), principle(), SITUATION
    )
    assert made.suppressed
    model.close()


def test_offline_a_rule_without_names_applies() -> None:
    made = instantiate_offline(principle(exceptions=("it is open",)), SITUATION, NAMES)
    assert made.text == "When you want to take something: open the box first. Except: it is open."


def test_offline_a_rule_of_another_task_type_is_suppressed() -> None:
    made = instantiate_offline(principle(task_type="cool"), SITUATION, NAMES)
    assert (made.text, made.reason) == ("", "learnt in tasks of type cool")
    assert not instantiate_offline(principle(task_type="heat"), SITUATION, NAMES).suppressed


def test_offline_a_rule_about_things_that_are_not_here_is_suppressed() -> None:
    absent = principle(condition="{1} is a safe")
    assert instantiate_offline(absent, SITUATION, NAMES).reason == "neither task nor first observation names safe"
    present = principle(condition="{1} is a microwave or a safe", scope="fridge")
    assert instantiate_offline(present, SITUATION, NAMES).text.endswith("Here: fridge 1, microwave 12.")
    # Only four in five games with a vault name it at their beginning: that this one does not says nothing.
    hidden = instantiate_offline(principle(condition="{1} is a vault"), SITUATION, NAMES)
    assert hidden.text == "When {1} is a vault: open the box first."
    # "safe" within another word names nothing
    assert not instantiate_offline(principle(condition="safely"), SITUATION, NAMES).suppressed
