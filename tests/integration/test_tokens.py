"""The token codec on a real tokenizer, with SmolLM2's and Qwen2.5's templates."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerBase

from train.config import ConfigError
from train.tokens import TokenCodec

pytestmark = pytest.mark.integration

QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|vision_start|>"]
QWEN_ADDED = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|repo_name|>", "<|file_sep|>"]
SMOLLM2_CANNOT_WRITE = "\x04\x06\x13\x14\x16\x1d"  # and the planes 4 to 11

CONVERSATIONS = [
    [
        "You see a mug 1.",
        "Thought: take it.\nAction: take mug 1 from desk 1",
        "You pick up the mug 1.",
        "Action: look",
        "x",
    ],
    [
        "é \t你好 🙂\n\n  indented\n",
        "  go  ",
        "\n\nNothing happens.\n",
        "",
        "1234567890 ¿?",
        "Don't",
        "{{ messages }} {% x %}",
    ],
]


def template_of_trl(name: str) -> str:
    package = importlib.util.find_spec("trl")
    if package is None or not package.submodule_search_locations:
        pytest.skip("TRL, which carries the templates, is not installed")
    return (Path(package.submodule_search_locations[0]) / "chat_templates" / name).read_text()


@pytest.fixture(scope="module", params=["smollm2", "qwen2.5"])
def tokenizer(request: pytest.FixtureRequest, smollm2_folder: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(smollm2_folder)
    if request.param == "qwen2.5":
        tokenizer.chat_template = template_of_trl("qwen2_5.jinja")
        tokenizer.add_special_tokens({"additional_special_tokens": QWEN_SPECIAL})
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in QWEN_ADDED])
    return tokenizer


@pytest.fixture(scope="module")
def codec(tokenizer: PreTrainedTokenizerBase) -> TokenCodec:
    return TokenCodec(tokenizer)


def ids_of(codec: TokenCodec, system: str | None, turns: list[str]) -> list[int]:
    ids = codec.start(system, turns[0])
    for reply, user in zip(turns[1::2], turns[2::2], strict=True):
        ids += codec.reply(reply) + codec.turn(user, closed=True)
    return ids


def template_ids(tokenizer: PreTrainedTokenizerBase, system: str | None, turns: list[str]) -> list[int]:
    messages = [] if system is None else [{"role": "system", "content": system.strip()}]
    messages += [{"role": ("user", "assistant")[i % 2], "content": turn.strip()} for i, turn in enumerate(turns)]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert isinstance(ids, list)
    return ids


@pytest.mark.parametrize("system", [None, "You are in a house.\nAnswer with one action.", "", " padded\n"])
@pytest.mark.parametrize("turns", CONVERSATIONS)
def test_ids_equal_the_template_on_the_whole_conversation(
    tokenizer: PreTrainedTokenizerBase, codec: TokenCodec, system: str | None, turns: list[str]
) -> None:
    assert ids_of(codec, system, turns) == template_ids(tokenizer, system, turns)


def test_without_a_system_message_the_template_s_default_is_there(
    tokenizer: PreTrainedTokenizerBase, codec: TokenCodec
) -> None:
    said = tokenizer.decode(codec.start(None, "Hi"))
    default = "named SmolLM" if "SmolLM" in str(tokenizer.chat_template) else "You are Qwen, created by Alibaba Cloud."
    assert default in said
    assert said.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_cut_completion_is_closed_by_the_next_turn(tokenizer: PreTrainedTokenizerBase, codec: TokenCodec) -> None:
    cut = codec.text("Action: take mug")
    ids = codec.start("S", "U") + cut + codec.turn("Nothing happens.", closed=False)
    assert ids == template_ids(tokenizer, "S", ["U", "Action: take mug", "Nothing happens."])


def expected(text: str) -> str:
    return "".join(
        "\ufffd" if char in SMOLLM2_CANNOT_WRITE or 0x40000 <= ord(char) < 0xC0000 else char for char in text
    )


def test_no_text_yields_an_added_token_and_all_text_comes_back(
    tokenizer: PreTrainedTokenizerBase, codec: TokenCodec
) -> None:
    added = [str(token) for token in tokenizer.get_added_vocab()]
    pieces = st.one_of(
        st.text(), st.sampled_from([*added, *QWEN_ADDED, *SMOLLM2_CANNOT_WRITE, "<|im_", "end|>", " ", "\n"])
    )

    @settings(max_examples=200)
    @given(st.lists(pieces).map("".join))
    def check(text: str) -> None:
        ids = codec.text(text)
        assert not set(tokenizer.added_tokens_decoder) & set(ids)
        assert codec.decode(ids) == expected(text)

    check()
    everything = "".join(added)
    assert codec.decode(codec.text(everything)) == everything


def test_a_template_of_words_gives_those_ids(tokenizer: PreTrainedTokenizerBase, codec: TokenCodec) -> None:
    """Content in which nothing is special is tokenised as the tokenizer itself does."""
    text = (
        "You arrive at cabinet 12. On the cabinet 12, you see a dishsponge 3, and a soapbottle 1.\n> go to sinkbasin 1"
    )
    assert codec.text(text) == tokenizer.encode(text, add_special_tokens=False)


def test_a_template_that_drops_earlier_thinking_is_refused(smollm2_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    tokenizer.chat_template = template_of_trl("qwen3.jinja")
    with pytest.raises(ConfigError, match=r"(?s)not append-only: .*thinking included"):
        TokenCodec(tokenizer)
