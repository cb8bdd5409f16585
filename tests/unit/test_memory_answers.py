"""Schemas of a language model's answers: their bounds, the longest answer, and a decoder that enforces them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from memory.answers import ANSWERS, AnswerLimits, Citation, EpisodeAnswer, HarmAnswer, bounded, longest
from memory.builder_settings import LanguageModelSettings
from memory.instantiate import BuilderAnswer

pytestmark = pytest.mark.unit

SMALL = AnswerLimits(characters=20, items=1, operations=1)
ALL = [*ANSWERS.values(), BuilderAnswer]


def test_the_longest_answer_by_hand() -> None:
    # {"why": "40", "evidence": [{"episode": "6", "step": 99999, "quote": "10"}], "harmful": false}
    citation = 2 + (11 + 8) + 2 + (8 + 5) + 2 + (9 + 12)
    assert longest(bounded(HarmAnswer, SMALL)) == 2 + (7 + 42) + 2 + (12 + 2 + citation) + 2 + (11 + 5) + 1 == 145
    # A second citation takes a comma and a space more.
    assert longest(bounded(HarmAnswer, AnswerLimits(characters=20, items=2))) == 145 + citation + 2


def test_limits_narrow_what_is_sent_and_not_what_is_valid() -> None:
    limits = AnswerLimits(characters=100, items=3, operations=2)
    schema = bounded(ANSWERS["procedures"], limits)
    operation = schema["$defs"]["ProcedureOperation"]["properties"]
    assert schema["properties"]["operations"]["maxItems"] == 2
    assert operation["reason"]["maxLength"] == 100
    assert (operation["steps"]["maxItems"], operation["steps"]["items"]["maxLength"]) == (3, 50)
    assert "share" not in json.dumps(schema)
    assert bounded(ANSWERS["predicate"], AnswerLimits(characters=600))["properties"]["trigger"]["maxLength"] == 1000
    # One name that does not exist makes one citation wrong, not the answer.
    assert Citation(episode="E1 (success)", step=-1, quote="q" * 300).step == -1
    with pytest.raises(ValidationError):
        Citation(episode="E1", step=1, quote="q" * 301)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "integer", "minimum": 0},
        {"type": "array", "items": {"type": "boolean"}},
        {"type": "number"},
        {"type": "object", "properties": {"a": {"type": "array", "maxItems": 2, "items": {"type": "string"}}}},
    ],
)
def test_a_schema_without_a_bound_has_no_longest_answer(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"is missing in|no bound is known"):
        longest(schema)


def values(node: dict[str, Any], definitions: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Whatever fits a schema, in plain letters."""
    if "$ref" in node:
        return values(definitions[node["$ref"].rsplit("/", 1)[1]], definitions)
    if "enum" in node:
        return st.sampled_from(node["enum"])
    match node["type"]:
        case "string":
            return st.integers(0, node["maxLength"]).map(lambda size: "x" * size)
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(node["minimum"], node["maximum"])
        case "array":
            items = values(node["items"], definitions)
            return st.lists(items, min_size=node.get("minItems", 0), max_size=node["maxItems"])
    return st.fixed_dictionaries({name: values(part, definitions) for name, part in node["properties"].items()})


@pytest.mark.parametrize("answer", ALL)
@settings(max_examples=30)
@given(data=st.data(), limits=st.builds(AnswerLimits, characters=st.integers(20, 60), items=st.integers(1, 3)))
def test_no_answer_is_longer_than_the_longest(
    answer: type[BaseModel], limits: AnswerLimits, data: st.DataObject
) -> None:
    schema = bounded(answer, limits)
    value = data.draw(values(schema, schema.get("$defs", {})))
    answer.model_validate(value)
    assert len(json.dumps(value)) < longest(schema)


# ---- a server that enforces the schema


class Decoder:
    """What vLLM decodes with when it runs with VLLM_STRUCTURED_OUTPUTS, over single bytes."""

    def __init__(self, schema: dict[str, Any]) -> None:
        guidance = pytest.importorskip("llguidance")
        grammar = guidance.LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})
        self._matcher = guidance.LLMatcher(guidance.LLTokenizer("byte"), grammar)
        assert not self._matcher.is_error(), self._matcher.get_error()

    def takes(self, text: str) -> bool:
        data = list(text.encode())
        return self._matcher.try_consume_tokens(data) == len(data) and self._matcher.is_accepting()

    def longest(self, limit: int) -> str:
        """What a model writes that goes on wherever it may: "x" first, large digits, an end only where it must."""
        text = ""
        while not self._matcher.is_stopped() and len(text) <= limit:
            mask = self._matcher.compute_logit_bias()
            allowed = [chr(byte) for byte in range(32, 127) if mask[byte]]
            if not allowed:
                break
            text += min(allowed, key=lambda char: (char in "}]", char == '"', char != "x", -ord(char)))
            assert self._matcher.consume_token(ord(text[-1]))
        return text


@pytest.mark.parametrize("answer", ALL)
def test_a_model_that_never_ends_is_made_to_end(answer: type[BaseModel]) -> None:
    schema = bounded(answer, AnswerLimits(characters=40, items=2, operations=2))
    text = Decoder(schema).longest(10_000)
    assert len(text) < longest(schema)
    value = answer.model_validate_json(text)
    # It wrote all that there is room for, but for names (retire, true) that are not the longest.
    assert len(json.dumps(value.model_dump())) >= longest(schema) - 12


CLAIM = '{"step":3,"what":"w","quote":"q"}'


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        (f'{{"goal":"{"g" * 20}","key_steps":[{CLAIM}],"obstacles":[]}}', True),
        (f'{{"goal":"{"g" * 21}","key_steps":[{CLAIM}],"obstacles":[]}}', False),
        (f'{{"goal":"say \\"a\\\\b\\"","key_steps":[{CLAIM}],"obstacles":[]}}', True),
        (f'{{"goal":"a\tb","key_steps":[{CLAIM}],"obstacles":[]}}', False),
        (f'{{"goal":"g","key_steps":[{CLAIM}],"obstacles":[{CLAIM}]}}', True),
        (f'{{"goal":"g","key_steps":[{CLAIM},{CLAIM}],"obstacles":[]}}', False),
        (f'{{"goal":"g","key_steps":[{CLAIM.replace("3", "99999")}],"obstacles":[]}}', True),
        (f'{{"goal":"g","key_steps":[{CLAIM.replace("3", "100000")}],"obstacles":[]}}', False),
        (f'{{"goal":"g","key_steps":[{CLAIM.replace("3", "-1")}],"obstacles":[]}}', False),
        ('{"goal":"g","key_steps":[],"obstacles":[]}', False),
        (f'{{"goal": "g","key_steps":[{CLAIM}],"obstacles":[]}}', False),
        (f'{{"goal":"g","key_steps":[{CLAIM}]}}', False),
    ],
)
def test_what_the_decoder_enforces(text: str, taken: bool) -> None:
    assert Decoder(bounded(EpisodeAnswer, SMALL)).takes(text) is taken


# ---- the setting that has to be large enough


def test_an_answer_fits_the_default_of_max_tokens() -> None:
    made = LanguageModelSettings(url="http://x", model="m")
    assert max(longest(bounded(answer, made.answers)) for answer in ANSWERS.values()) == 15421 <= made.max_tokens


def test_too_few_tokens_for_the_longest_answer_are_named() -> None:
    with pytest.raises(ValidationError) as error:
        LanguageModelSettings(url="http://x", model="m", max_tokens=4096)
    assert (
        "max_tokens 4096 is less than the 15421 tokens of the longest answer (stage procedures), which would be cut "
        "off; set max_tokens to 15421 or more, or lower answers.characters (200), answers.items (8), "
        "answers.operations (4)"
    ) in str(error.value)
    fitting = LanguageModelSettings(
        url="http://x", model="m", max_tokens=1099, answers=AnswerLimits(characters=80, items=2, operations=1)
    )
    assert fitting.max_tokens == 1099
    # Where no schema is enforced, no length is known.
    assert LanguageModelSettings(url="http://x", model="m", max_tokens=50, structured="json_object").max_tokens == 50
