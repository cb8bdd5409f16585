import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import CHATML, tiny_tokenizer
from train.config import ConfigError
from train.tokens import TokenCodec

pytestmark = pytest.mark.unit

START, END = tiny_tokenizer().convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])


def letters(text: str) -> list[int]:
    """Ids of ASCII text in the tiny tokenizer: one a byte, numbered in the byte-level alphabet's order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    written = text.replace(" ", "Ġ").replace("\n", "Ċ")
    return [alphabet.index(char) for char in written]


@pytest.fixture(scope="module")
def codec() -> TokenCodec:
    return TokenCodec(tiny_tokenizer())


def test_the_start_is_the_template_up_to_the_generation_prompt(codec: TokenCodec) -> None:
    assert codec.start("Be brief.", "Hi") == [
        *(START, *letters("system\nBe brief."), END, *letters("\n")),
        *(START, *letters("user\nHi"), END, *letters("\n")),
        *(START, *letters("assistant\n")),
    ]
    assert codec.start(None, "Hi") == [START, *letters("user\nHi"), END, *letters("\n"), START, *letters("assistant\n")]


def test_a_turn_closes_a_cut_completion_first(codec: TokenCodec) -> None:
    delta = [*letters("\n"), START, *letters("user\nSeen."), END, *letters("\n"), START, *letters("assistant\n")]
    assert codec.turn("Seen.", closed=True) == delta
    assert codec.turn("Seen.", closed=False) == [END, *delta]


def test_a_reply_ends_with_the_end_of_turn_token(codec: TokenCodec) -> None:
    assert codec.eot_id == END
    assert codec.reply("go") == [*letters("go"), END]


def test_turns_strip_white_space_and_text_does_not(codec: TokenCodec) -> None:
    assert codec.start(" S\n", "\n U \t") == codec.start("S", "U")
    assert codec.turn("\n\nU ", closed=True) == codec.turn("U", closed=True)
    assert codec.reply(" go\n") == codec.reply("go")
    assert codec.text(" a\n") == letters(" a\n")


def test_decode_leaves_special_tokens_out(codec: TokenCodec) -> None:
    assert codec.decode([START, *letters("user , go ."), END]) == "user , go ."


SPECIALS = ["<|im_start|>", "<|im_end|>", "<|unk|>", "<|im_", "end|>", "\n", " ", "\x04", "é", "\U0010ffff"]


@given(st.lists(st.one_of(st.text(), st.sampled_from(SPECIALS))).map("".join))
def test_no_text_yields_a_special_token_and_all_text_comes_back(text: str) -> None:
    codec = _CODEC
    ids = codec.text(text)
    assert not codec.added_ids & set(ids)
    assert codec.decode(ids) == text


_CODEC = TokenCodec(tiny_tokenizer())


@given(st.lists(st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"])), min_size=2, max_size=8))
def test_ids_equal_the_template_on_the_whole_conversation(texts: list[str]) -> None:
    system, *turns = texts
    turns = turns if len(turns) % 2 else turns[:-1] or ["x"]  # ends with a user
    ids = _CODEC.start(system, turns[0])
    for reply, user in zip(turns[1::2], turns[2::2], strict=True):
        ids += _CODEC.reply(reply) + _CODEC.turn(user, closed=True)
    messages = [{"role": "system", "content": system.strip()}]
    messages += [{"role": ("user", "assistant")[i % 2], "content": turn.strip()} for i, turn in enumerate(turns)]
    tokenizer = tiny_tokenizer()
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_half_a_surrogate_pair_becomes_the_replacement_character(codec: TokenCodec) -> None:
    assert codec.decode(codec.text("a\ud83db")) == "a\ufffdb"
    assert codec.decode(codec.text("\ud83d\ude00")) == "\U0001f600"


def hostile_tokenizer(*more_merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """As SmolLM2's and worse: special tokens in the vocabulary, merges that spell one, bytes it cannot write."""
    alphabet = [char for char in sorted(pre_tokenizers.ByteLevel.alphabet()) if char != "Ą"]  # the byte 0x04
    pieces = ["<|", "<|u", "<|un", "<|unk", "<|unk|", "<|unk|>"]
    merges = [*((piece[:-1], piece[-1]) for piece in pieces), *more_merges]
    vocab = {token: index for index, token in enumerate([*alphabet, *pieces, *map("".join, more_merges)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<|unk|>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", unk_token="<|unk|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens(["<tool_call>"])
    tokenizer.chat_template = CHATML
    return tokenizer


def test_merges_unknown_bytes_and_plain_added_tokens_yield_no_added_token() -> None:
    tokenizer = hostile_tokenizer()
    codec = TokenCodec(tokenizer)
    unk, tool_call = tokenizer.convert_tokens_to_ids(["<|unk|>", "<tool_call>"])
    assert tokenizer.encode("<|unk|>\x04<tool_call>") == [unk, unk, tool_call]  # what must not happen
    ids = codec.text("<|unk|>\x04<tool_call>")
    assert not {unk, tool_call} & set(ids)
    assert max(ids) < len(tokenizer)
    assert codec.decode(ids) == "<|unk|>\ufffd<tool_call>"
    assert ids[:2] == tokenizer.convert_tokens_to_ids(["<|unk|", ">"])  # merged as far as the text allows


def with_template(template: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


DROPS_THINKING = CHATML.replace("m['content']", "m['content'].split('</think>')[-1]")
MARKS_THE_LAST = CHATML.replace("<|im_end|>", "<|im_end|>{% if loop.last %}!{% endif %}")
NO_END = CHATML.replace("<|im_end|>", "")
USER_IN_FRONT = "{{ messages[-1]['content'] }}" + CHATML


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        (DROPS_THINKING, "not append-only: it renders '<think>.*not at all.*thinking included"),
        (MARKS_THE_LAST, "not append-only: equal turns look different"),
        (USER_IN_FRONT, "not append-only: a longer conversation does not begin with the shorter one's prompt"),
        (CHATML + CHATML, "not append-only: it renders 'qzfirst.*twice"),
        (NO_END, "does not begin with a special token"),
        ("{{ raise_exception('tools only') }}", "fails on a plain conversation: tools only"),
    ],
)
def test_an_unfit_template_is_a_clear_error(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        TokenCodec(with_template(template))


def test_a_template_without_system_messages_says_so_when_one_is_given() -> None:
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    codec = TokenCodec(with_template(refuses))
    assert codec.start(None, "Hi") == TokenCodec(tiny_tokenizer()).start(None, "Hi")
    with pytest.raises(ConfigError, match="takes no system message"):
        codec.start("Be brief.", "Hi")


def test_a_tokenizer_that_is_no_byte_pair_one_is_refused() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "<u>": 1}, unk_token="<u>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHATML)
    with pytest.raises(ConfigError, match="WordLevel model; only byte-pair"):
        TokenCodec(tokenizer)


def test_turns_that_merge_with_the_template_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be tokenised one by one"):
        TokenCodec(hostile_tokenizer(("Ċ", "Y")))  # the newline of a role header and an observation's first letter
