import pytest

from tests.tiny import tiny_tokenizer
from train.chat import Generation
from train.conversation import Conversation
from train.tokens import TokenCodec

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def codec() -> TokenCodec:
    return TokenCodec(tiny_tokenizer())


def conversation(codec: TokenCodec, budget: int = 1000, observation_tokens: int = 50) -> Conversation:
    return Conversation(codec, "S", context_tokens=budget, observation_tokens=observation_tokens, max_new_tokens=10)


def text(codec: TokenCodec, ids: list[int]) -> str:
    return codec._tokenizer.decode(ids)


def generation(codec: TokenCodec, said: str, *, finish: str = "stop") -> Generation:
    ids = codec.text(said) + ([codec.eot_id] if finish == "stop" else [])
    return Generation(said, ids, [-0.5] * len(ids), finish=finish, adapter="policy-v0001")  # type: ignore[arg-type]


def test_an_append_only_dialogue_is_one_context(codec: TokenCodec) -> None:
    talk = conversation(codec)
    first = talk.user("room")
    assert (
        text(codec, first)
        == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nroom<|im_end|>\n<|im_start|>assistant\n"
    )
    talk.reply(generation(codec, "go"), 0)
    second = talk.user("desk", "!")
    assert (
        text(codec, second[len(first) :]) == "go<|im_end|>\n<|im_start|>user\ndesk!<|im_end|>\n<|im_start|>assistant\n"
    )
    talk.reply(generation(codec, "abc", finish="length"), 1)
    third = talk.user("x")
    assert text(codec, third[len(second) :]).startswith("abc<|im_end|>\n<|im_start|>user\nx")
    (context,) = talk.contexts
    assert context.ids == third
    spans = [(text(codec, context.ids[s.start : s.end]), s.step, s.adapter, s.logprobs) for s in context.spans]
    assert spans == [
        ("go<|im_end|>", 0, "policy-v0001", [-0.5] * 3),
        ("abc", 1, "policy-v0001", [-0.5] * 3),  # the end-of-turn that mends the cut belongs to nobody
    ]


def test_sampled_ids_are_kept_even_where_no_tokenizer_would_give_them(codec: TokenCodec) -> None:
    """A model may sample ids that spell <|im_start|> or split a character; they must come back as they were."""
    odd = [256, 300, 3, 256, codec.eot_id]
    talk = conversation(codec)
    start = len(talk.user("room"))
    talk.reply(Generation("?", odd, [-1.0] * 5), 0)
    talk.user("next")
    assert talk.contexts[0].ids[start : start + 5] == odd


def test_demonstrations_mark_what_no_loss_may_touch(codec: TokenCodec) -> None:
    talk = conversation(codec)
    talk.user("room")
    talk.demonstrate("wrong", 0, trained=False)
    talk.user("no")
    talk.demonstrate("right", 1, trained=True)
    (context,) = talk.contexts
    assert [(text(codec, context.ids[s.start : s.end]), s.trained) for s in context.spans] == [
        ("wrong<|im_end|>", False),
        ("right<|im_end|>", True),
    ]


def test_over_the_budget_the_oldest_turns_go_and_a_new_context_begins(codec: TokenCodec) -> None:
    talk = conversation(codec, budget=260)
    prompts = []
    for step in range(12):
        prompts.append(talk.user("room" if step == 0 else f"seen {step}"))
        talk.reply(generation(codec, f"act {step}"), step)
    assert all(len(prompt) + 10 <= 260 for prompt in prompts)
    assert len(talk.contexts) > 1
    for context in talk.contexts[1:]:
        head = text(codec, context.ids[: context.spans[0].start])
        assert len(context.ids[: context.spans[0].start]) <= 130
        dropped = int(head.split("[")[1].split(" ")[0])
        # the task stays, a note counts what was left out, and the newest message is there
        assert head.startswith(
            f"<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nroom\n[{dropped} turns left out]\nseen {dropped}"
        )
        assert f"seen {context.spans[0].step}<|im_end|>" in head
    # every reply lies in exactly one span
    assert [span.step for context in talk.contexts for span in context.spans] == list(range(12))
    for context in talk.contexts:
        for span in context.spans:
            assert text(codec, context.ids[span.start : span.end]) == f"act {span.step}<|im_end|>"


def test_a_long_observation_is_cut_in_the_middle(codec: TokenCodec) -> None:
    talk = conversation(codec, observation_tokens=16)
    prompt = text(codec, talk.user("a" * 100 + "z" * 100, "\nlist"))
    assert f"user\n{'a' * 8} […] {'z' * 8}\nlist<|im_end|>" in prompt


def test_a_budget_too_small_for_one_turn_says_what_to_change(codec: TokenCodec) -> None:
    talk = conversation(codec, budget=128, observation_tokens=64)
    talk.user("a" * 40)
    talk.reply(generation(codec, "go"), 0)
    with pytest.raises(ValueError, match=r"agent\.context_tokens 128: .* raise context_tokens"):
        talk.user("b" * 60)
