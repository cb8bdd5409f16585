from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.grammar import ActionGrammar, fill, kind, slots

pytestmark = pytest.mark.unit

ACTIONS = [
    *("walk to shelf 1", "walk to shelf 2", "walk to box 1", "walk to door 3"),
    *("grab cup 1 off shelf 1", "grab cup 2 off shelf 2", "grab key 1 off box 1", "grab pen 1 off shelf 2"),
    *("drop cup 1 into box 1", "drop key 1 into shelf 1", "drop pen 1 into box 1", "drop cup 2 into box 1"),
    *("look", "look", "look around", "look around"),
]
TEXTS = ["You see shelf 1, shelf 2, box 1 and door 3.", "On shelf 1: cup 1, cup 2, key 1 and pen 1."]


def test_words_left_and_right_of_which_names_recur_are_fixed() -> None:
    grammar = ActionGrammar.fit(ACTIONS, TEXTS)
    expected = {"walk to {0}", "grab {0} off {1}", "drop {0} into {1}", "look", "look around"}
    assert set(grammar.templates) == expected


def test_parse_gives_template_and_names() -> None:
    grammar = ActionGrammar.fit(ACTIONS, TEXTS)
    assert grammar.parse("grab tea pot 12 off box 1") == ("grab {0} off {1}", ("tea pot 12", "box 1"))
    assert grammar.parse("  look   around ") == ("look around", ())


def test_an_unknown_action_is_its_first_word() -> None:
    grammar = ActionGrammar.fit(ACTIONS, TEXTS)
    assert grammar.parse("sing a song") == ("sing …", ())
    assert grammar.parse("walk") == ("walk …", ())
    assert grammar.parse("") == ("…", ())


def test_the_template_with_most_fixed_words_wins() -> None:
    grammar = ActionGrammar(templates=("use {0}", "use {0} on {1}"))
    assert grammar.parse("use key on door") == ("use {0} on {1}", ("key", "door"))
    assert grammar.parse("use key") == ("use {0}", ("key",))


def test_a_world_that_echoes_actions_does_not_hide_their_form() -> None:
    actions = [f"rub {thing} with {tool}" for thing in ("cup 1", "pen 1", "key 1") for tool in ("rag 1", "wax 1")]
    texts = [f"{action}: done." for action in actions] + ["Here: cup 1, pen 1, key 1, rag 1, wax 1."]
    assert ActionGrammar.fit(actions, texts).templates == ("rub {0} with {1}",)


def test_a_word_within_names_is_not_fixed() -> None:
    actions = ["hold glass cup", "hold tin cup", "hold wood cup", "hold glass jar", "hold tin lid"]
    texts = ["There are a glass cup, a tin cup, a wood cup, a glass jar and a tin lid."]
    assert ActionGrammar.fit(actions, texts).templates == ("hold {0}",)


def test_fixed_words_may_stand_side_by_side_where_no_name_begins_in_them() -> None:
    places = ("yard", "attic", "shed", "hall", "loft")
    things = ("box", "jar", "bag", "tin", "pot", "urn")
    actions = [f"open gate to {place}" for place in places] + [f"open {thing}" for thing in things]
    texts = [f"There is a {name}." for name in (*places, *things)]
    assert set(ActionGrammar.fit(actions, texts).templates) == {"open gate to {0}", "open {0}"}
    things = ("rack 1", "rack 2", "rack 3", "rack 4", "rack 5")
    actions = [f"go to towel {thing}" for thing in things] + ["go to towel 1", "go to towel 2", "go to desk 1"]
    texts = [f"There is a towel {thing}." for thing in things] + ["A towel 1, a towel 2, a desk 1."]
    assert ActionGrammar.fit(actions, texts).templates == ("go to {0}",)


def test_the_one_numbered_thing_that_is_ever_used_is_a_name() -> None:
    grammar = ActionGrammar.fit(["switch lamp 1", "switch lamp 1", "sit down", "sit down"], ["There is a lamp 1."])
    assert set(grammar.templates) == {"switch {0}", "sit down"}
    assert grammar.parse("switch lamp 1") == ("switch {0}", ("lamp 1",))


def test_single_slips_get_no_template() -> None:
    grammar = ActionGrammar.fit([*ACTIONS, "I think that the cup is gone"], TEXTS)
    assert not any(template.startswith("I") for template in grammar.templates)


def test_it_survives_json() -> None:
    grammar = ActionGrammar.fit(ACTIONS, TEXTS)
    assert ActionGrammar.model_validate_json(grammar.model_dump_json()) == grammar


def test_no_actions_no_templates() -> None:
    assert ActionGrammar.fit([], []).templates == ()


names = st.text("abc", min_size=1, max_size=4).map(lambda text: f"{text} 1")


@given(st.sampled_from(["walk to {0}", "grab {0} off {1}", "look around"]), st.lists(names, min_size=2, max_size=2))
def test_parse_undoes_fill(template: str, given: list[str]) -> None:
    grammar = ActionGrammar(templates=("walk to {0}", "grab {0} off {1}", "look around"))
    expected = tuple(given[: slots(template)])
    assert grammar.parse(fill(template, given)) == (template, expected)


@given(st.lists(st.text("ab1 {}", max_size=12), max_size=20))
def test_any_text_is_taken(actions: list[str]) -> None:
    grammar = ActionGrammar.fit(actions, actions)
    for action in actions:
        template, given = grammar.parse(action)
        assert slots(template) == len(given) or "…" in template


def test_kinds() -> None:
    assert [kind(name) for name in ("drawer 2", "tea pot 12 3", "orange", "7")] == ["drawer", "tea pot", "orange", "7"]
