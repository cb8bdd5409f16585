import asyncio

import pytest

from tests.tiny import tiny_tokenizer
from train.chat import ModelFault, Sampling
from train.scripted_model import ScriptedModel
from train.tokens import TokenCodec

pytestmark = pytest.mark.unit

LONG = Sampling(max_tokens=100)


def test_answers_come_in_order_with_ids_and_zero_log_probabilities() -> None:
    codec = TokenCodec(tiny_tokenizer())
    model = ScriptedModel(["go", "look"], codec)
    first = asyncio.run(model.complete([1, 2, 3], LONG, "a"))
    assert first.token_ids == [*codec.text("go"), codec.eot_id]
    assert first.logprobs == [0.0, 0.0, 0.0]
    assert (first.text, first.finish, first.prompt_tokens) == ("go", "stop", 3)
    assert asyncio.run(model.complete([1], LONG, "b")).text == "look"
    with pytest.raises(ModelFault, match="no answer left"):
        asyncio.run(model.complete([1], LONG, "a"))


def test_a_function_sees_the_text_of_the_prompt() -> None:
    codec = TokenCodec(tiny_tokenizer())
    model = ScriptedModel(lambda prompt: "yes" if "You see a mug" in prompt else "no", codec)
    assert asyncio.run(model.complete(codec.start(None, "You see a mug."), LONG, "a")).text == "yes"
    assert asyncio.run(model.complete(codec.start(None, "You see a cup."), LONG, "a")).text == "no"


def test_an_answer_is_cut_as_a_real_model_s() -> None:
    codec = TokenCodec(tiny_tokenizer())
    model = ScriptedModel(["four", "four"], codec)
    cut = asyncio.run(model.complete([1], Sampling(max_tokens=4), "a"))
    assert (cut.text, cut.finish, len(cut.token_ids)) == ("four", "length", 4)
    whole = asyncio.run(model.complete([1], Sampling(max_tokens=5), "a"))
    assert (whole.finish, whole.token_ids[-1]) == ("stop", codec.eot_id)
