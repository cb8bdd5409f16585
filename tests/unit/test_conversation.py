import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import tiny_tokenizer
from train.chat import Generation
from train.conversation import Conversation
from train.rows import rows_of
from train.tokens import TokenCodec
from train.trajectory import Episode

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


def test_an_opening_is_given_and_not_trained(codec: TokenCodec) -> None:
    talk = conversation(codec)
    prompt = talk.user("room", opening="Thought: look.\n")
    assert text(codec, prompt).endswith("<|im_start|>assistant\nThought: look.\n")
    talk.reply(generation(codec, "go"), 0)
    second = talk.user("desk")
    assert text(codec, second[len(prompt) :]).startswith("go<|im_end|>\n<|im_start|>user\ndesk")
    (span,) = talk.contexts[0].spans
    assert text(codec, talk.contexts[0].ids[span.start : span.end]) == "go<|im_end|>"


def test_an_accepted_resample_keeps_what_was_rejected_out_of_the_loss(codec: TokenCodec) -> None:
    talk = conversation(codec)
    talk.user("room")
    talk.reply(generation(codec, "bad"), 0)
    prompt = text(codec, talk.reject("Do not."))
    assert prompt.endswith("bad<|im_end|>\n<|im_start|>user\nDo not.<|im_end|>\n<|im_start|>assistant\n")
    talk.reply(generation(codec, "good"), 0)
    talk.user("next")
    (context,) = talk.contexts
    assert [(text(codec, context.ids[s.start : s.end]), s.trained) for s in context.spans] == [
        ("bad<|im_end|>", False),
        ("good<|im_end|>", True),
    ]


def test_a_fall_back_drops_the_resampling_branch(codec: TokenCodec) -> None:
    talk = conversation(codec)
    talk.user("room")
    talk.reply(generation(codec, "first", finish="length"), 0)
    before = list(talk.contexts[0].ids)
    talk.reject("no")
    talk.reply(generation(codec, "second"), 0)
    talk.reject("no")
    talk.reply(generation(codec, "third"), 0)
    talk.fall_back()
    assert talk.contexts[0].ids == before
    assert [(s.trained, s.step) for s in talk.contexts[0].spans] == [(True, 0)]
    assert text(codec, talk.user("on")).endswith(
        "first<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(RuntimeError):
        talk.fall_back()


def test_the_last_turns_window_rebuilds_every_prompt(codec: TokenCodec) -> None:
    talk = Conversation(codec, "S", context_tokens=1000, observation_tokens=50, max_new_tokens=10, last_turns=1)
    heads = []
    for step in range(4):
        heads.append(text(codec, talk.user(f"seen {step}")))
        talk.reply(generation(codec, f"act {step}"), step)
    system = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n"
    ask = "<|im_end|>\n<|im_start|>assistant\n"
    assert heads == [
        f"{system}seen 0{ask}",
        f"{system}seen 0{ask}act 0<|im_end|>\n<|im_start|>user\nseen 1{ask}",
        f"{system}seen 0\n[1 turns left out]\nseen 1{ask}act 1<|im_end|>\n<|im_start|>user\nseen 2{ask}",
        f"{system}seen 0\n[2 turns left out]\nseen 2{ask}act 2<|im_end|>\n<|im_start|>user\nseen 3{ask}",
    ]
    assert [[span.step for span in context.spans] for context in talk.contexts] == [[0], [1], [2], [3]]


REPLIES = st.tuples(st.integers(1, 9), st.booleans())
"""Length of a generation, and whether it ended by itself."""

TURNS = st.lists(
    st.tuples(
        st.integers(1, 30),  # letters of the observation
        st.sampled_from(["", "Thought: x\n"]),
        st.lists(REPLIES, min_size=1, max_size=4),  # attempts
        st.booleans(),  # the last attempt is accepted, or all fall back to the first
        st.sampled_from(["action", "plan"]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150)
@given(TURNS, st.sampled_from([None, 1, 2]), st.sampled_from([230, 400, 10_000]), st.booleans())
def test_every_executed_token_is_trained_once_with_the_samplers_logprob(
    turns: list[tuple[int, str, list[tuple[int, bool]], bool, str]], last_turns: int | None, budget: int, plans: bool
) -> None:
    codec = TokenCodec(tiny_tokenizer())
    talk = Conversation(
        codec, "S", context_tokens=budget, observation_tokens=20, max_new_tokens=10, last_turns=last_turns
    )
    numbers = itertools.count(1)
    executed: list[tuple[int, float, int]] = []
    prompts: list[list[int]] = []

    def sample(step: int, reply: tuple[int, bool], role: str) -> list[tuple[int, float, int]]:
        length, ended = reply
        ids = [next(numbers) % 256 for _ in range(length)] + ([codec.eot_id] if ended else [])
        logprobs = [-float(next(numbers)) for _ in ids]
        finish = "stop" if ended else "length"
        talk.reply(Generation("", ids, logprobs, finish), step, role)  # type: ignore[arg-type]
        return [(token, logprob, step) for token, logprob in zip(ids, logprobs, strict=True)]

    for step, (letters, opening, attempts, accepted, role) in enumerate(turns):
        prompts.append(talk.user("o" * letters, opening=opening))
        sampled = [sample(step, attempts[0], role)]
        for attempt in attempts[1:]:
            prompts.append(talk.reject("no"))
            sampled.append(sample(step, attempt, role))
        if len(attempts) > 1 and not accepted:
            talk.fall_back()
        if role == "action" or plans:
            executed += sampled[-1 if accepted else 0]

    assert all(len(prompt) + 10 <= budget for prompt in prompts)
    episode = Episode(id="e", phase="p", env="household", task="t", task_type="pick", seed=0, contexts=talk.contexts)
    rows = rows_of(episode, ["action", "plan"] if plans else ["action"])
    trained = [
        (row.ids[i], row.logprobs[i], row.steps[i]) for row in rows for i, flag in enumerate(row.trained) if flag
    ]
    assert trained == executed
    if last_turns is None and budget == 10_000:
        assert len(rows) <= 1


def test_falling_back_leaves_a_given_reply_untrained(codec: TokenCodec) -> None:
    talk = conversation(codec)
    talk.user("room")
    talk.demonstrate("Action: a", 0, trained=False, author="recalled")
    talk.reject("no")
    talk.reply(generation(codec, "b"), 0)
    talk.fall_back()
    [span] = talk.contexts[0].spans
    assert (span.trained, span.adapter) == (False, "recalled")
