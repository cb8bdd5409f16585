"""The client of a language model against a scripted server: retries, limits, cache, secrecy of the key."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from memory.builder_settings import LanguageModelSettings
from memory.language_model import BudgetSpent, LanguageModel, LanguageModelFault, UnusableAnswer, without_lengths
from memory.records import MemoryRecordError
from tests.scripted_server import Reply, ScriptedServer, script

pytestmark = pytest.mark.unit


class Thing(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    parts: list[int] = Field(max_length=3)


GOOD = Reply('{"name": "a", "parts": [1]}')
ASKED = [{"role": "user", "content": "Name a thing."}]


class Case:
    """A server with a script, a client of it, and the seconds that the client waited."""

    def __init__(self, server: ScriptedServer, folder: Path, **settings: Any) -> None:
        self.server = server
        self.waits: list[float] = []
        self._made = {"url": server.url, "model": "m", "tries": 4, "reasks": 1, **settings}
        self._folder = folder
        self.model = self.again()

    def again(self) -> LanguageModel:
        """Another client with the same cache."""
        return LanguageModel(LanguageModelSettings.model_validate(self._made), self._folder, sleep=self.waits.append)


@pytest.fixture
def case(tmp_path: Path) -> Any:
    servers = []

    def make(answer: Callable[[dict[str, Any]], Reply], **settings: Any) -> Case:
        server = ScriptedServer(answer)
        servers.append(server)
        return Case(server.__enter__(), tmp_path / "cache", **settings)

    yield make
    for server in servers:
        server.__exit__()


def test_answer_is_validated_counted_and_cached(case: Any) -> None:
    one = case(script(GOOD), price_in=2.0, price_out=10.0)
    assert one.model.structured(ASKED, Thing) == Thing(name="a", parts=[1])
    assert one.model.spend.as_dict() == {
        "calls": 1,
        "cached": 0,
        "tokens_in": 100,
        "tokens_out": 10,
        "cost": 0.0003,  # 100 * 2 / 1e6 + 10 * 10 / 1e6
        "retried": {},
        "unusable": {},
        "estimated": 0,
        "form": "json_schema",
        "answers": {"Thing": {"answers": 1, "complete": 1, "valid": 1, "grounded": 1}},
    }
    again = one.again()
    assert again.structured(ASKED, Thing) == Thing(name="a", parts=[1])
    assert (again.spend.calls, again.spend.cached, again.spend.cost) == (0, 1, 0.0)
    assert len(one.server.requests) == 1
    sent = one.server.requests[0][1]
    assert sent["response_format"]["json_schema"]["schema"]["properties"]["parts"]["maxItems"] == 3
    assert (sent["temperature"], sent["max_tokens"]) == (0.0, 16384)


@pytest.mark.parametrize(
    ("bad", "kind", "wait"),
    [
        (Reply("slow down", status=429, headers={"Retry-After": "7"}), "HTTP 429", 7.0),
        (Reply("slow down", status=429, headers={"Retry-After": "99999"}), "HTTP 429", 60.0),
        (Reply("slow down", status=429, headers={"Retry-After": "Wed, 01 Jan 2200 00:00:00 GMT"}), "HTTP 429", 60.0),
        (Reply("oops", status=500), "HTTP 500", None),
        (Reply(raw="<html>gateway</html>", status=502), "HTTP 502", None),
        (Reply(raw="<html>hello</html>"), "no answer in HTTP 200", None),
        (Reply(raw='{"choices": []}'), "no answer in HTTP 200", None),
        (Reply(raw="[" * 100000), "no answer in HTTP 200", None),
        (Reply(hang_up=True), "RemoteProtocolError", None),
        (Reply("late", delay_s=3.0), "ReadTimeout", None),
    ],
)
def test_what_passes_is_tried_again(case: Any, bad: Reply, kind: str, wait: float | None) -> None:
    one = case(script(bad, GOOD), timeout_s=2.0)
    assert one.model.structured(ASKED, Thing).name == "a"
    assert one.model.spend.retried == {kind: 1}
    assert one.model.spend.calls == 1
    assert len(one.waits) == 1
    if wait is None:
        assert 0.25 <= one.waits[0] <= 0.5
    else:
        assert one.waits == [wait]


def test_an_answer_without_a_text_is_paid_and_asked_again(case: Any) -> None:
    """So a model answers that refuses, or that spent all its tokens on thinking."""
    one = case(script(Reply(None), GOOD))
    assert one.model.structured(ASKED, Thing).name == "a"
    assert (one.model.spend.calls, dict(one.model.spend.retried), dict(one.model.spend.unusable)) == (
        2,
        {},
        {"not JSON": 1},
    )


def test_unusable_answers_are_not_kept_where_another_sample_may_be_better(case: Any) -> None:
    for temperature, calls in ((0.7, 4), (0.0, 2)):
        one = case(script(*[Reply("no")] * 4), temperature=temperature, reasks=1)
        for _ in range(2):
            with pytest.raises(UnusableAnswer):
                one.model.structured(ASKED, Thing)
        assert one.model.spend.calls == calls


def test_waits_grow_and_end(case: Any) -> None:
    one = case(script(Reply("oops", status=500)))
    with pytest.raises(LanguageModelFault, match=r"failed 4 times, last with HTTP 500: oops"):
        one.model.ask(ASKED, Thing)
    assert [round(wait / 0.5 / 2**i) for i, wait in enumerate(one.waits)] == [1, 1, 1]  # each within its half
    assert one.model.spend.retried == {"HTTP 500": 4}
    assert not list(one._folder.glob("*"))


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (Reply("I think it is a lamp."), "not JSON"),
        (Reply('{"name": "a", "parts": [1'), "not JSON"),
        (Reply('{"name": "a", "parts": [1', finish="length"), "cut off"),
        (Reply('{"name": "a"}'), "not as the schema says"),
        (Reply('{"name": "a", "parts": [1, 2, 3, 4]}'), "not as the schema says"),
        (Reply('[{"name": "a", "parts": []}, {}]'), "not JSON"),
        (Reply("[" * 100000), "not JSON"),
        (Reply('{"name": "a", "parts": [1' + "0" * 5000 + "]}"), "not JSON"),
        (Reply('{"name": "a", "parts": [1], "note": "not asked for"}'), "not as the schema says"),
        (Reply(" " * 5000, finish="length"), "cut off"),
        (Reply(None, finish="length"), "cut off"),
        (Reply(""), "not JSON"),
    ],
)
def test_an_unusable_answer_is_asked_for_again_once(case: Any, bad: Reply, kind: str) -> None:
    one = case(script(bad, GOOD))
    assert one.model.structured(ASKED, Thing).name == "a"
    assert one.model.spend.unusable == {kind: 1}
    complete = 1 + (bad.finish == "stop")
    assert one.model.spend.answers == {"Thing": {"answers": 2, "complete": complete, "valid": 1, "grounded": 1}}
    followed = one.server.requests[1][1]["messages"]
    assert [message["role"] for message in followed] == ["user", "assistant", "user"]
    again = one.again()  # both answers lie in the cache
    assert again.structured(ASKED, Thing).name == "a"
    assert (again.spend.calls, again.spend.cached, len(one.server.requests)) == (0, 2, 2)


def test_answers_that_stay_unusable_are_a_fault(case: Any) -> None:
    one = case(script(Reply("no")))
    with pytest.raises(LanguageModelFault, match="no usable answer in 2"):
        one.model.structured(ASKED, Thing)
    assert one.model.spend.unusable == {"not JSON": 2}


def test_a_checked_answer_is_asked_for_again_and_the_last_one_kept(case: Any) -> None:
    better = Reply('{"name": "b", "parts": []}')
    one = case(script(GOOD, better, Reply("never asked")))
    value = one.model.structured(ASKED, Thing, lambda thing: [f"{thing.name} is wrong."])
    assert value.name == "b"
    assert one.model.spend.unusable == {"wrong evidence or operation": 2}
    assert one.model.spend.answers == {"Thing": {"answers": 2, "complete": 2, "valid": 2, "grounded": 0}}
    assert "a is wrong." in one.server.requests[1][1]["messages"][-1]["content"]


@pytest.mark.parametrize("text", ['```json\n{"name": "a", "parts": []}\n```', 'Here: {"name": "a", "parts": []} Done.'])
def test_json_in_wrapping(case: Any, text: str) -> None:
    assert case(script(Reply(text))).model.structured(ASKED, Thing).parts == []


def test_control_characters_that_a_grammar_let_pass(case: Any) -> None:
    assert case(script(Reply('{"name": "a\tb\nc", "parts": []}'))).model.structured(ASKED, Thing).name == "a\tb\nc"


def test_a_server_without_schemas_is_asked_without(case: Any) -> None:
    def answer(body: dict[str, Any]) -> Reply:
        form = body.get("response_format", {}).get("type")
        return Reply("unsupported response_format", status=400) if form == "json_schema" else GOOD

    one = case(answer)
    for number in range(2):
        assert one.model.structured([{"role": "user", "content": str(number)}], Thing).name == "a"
    forms = [body.get("response_format", {}).get("type") for _, body in one.server.requests]
    assert forms == ["json_schema", "json_schema", "json_object", "json_object"]  # refused twice, then remembered
    assert one.model.spend.form == "json_object"
    assert one.model.spend.retried == {"HTTP 400 to a response format": 2}
    assert one.waits == []


def test_a_request_that_is_wrong_in_itself_is_a_fault_and_changes_nothing(case: Any) -> None:
    one = case(script(Reply("context too long", status=400), Reply("context too long", status=400),
                      Reply("context too long", status=400), Reply("context too long", status=400), GOOD))  # fmt: skip
    with pytest.raises(LanguageModelFault, match="HTTP 400: context too long"):
        one.model.ask(ASKED, Thing)
    assert one.model.structured(ASKED, Thing).name == "a"
    assert one.server.requests[-1][1]["response_format"]["type"] == "json_schema"


def test_limit_of_calls(case: Any) -> None:
    one = case(script(GOOD), max_calls=2)
    for number in range(2):
        one.model.ask([{"role": "user", "content": str(number)}], Thing)
    with pytest.raises(BudgetSpent, match="max_calls"):
        one.model.ask([{"role": "user", "content": "2"}], Thing)
    one.model.ask([{"role": "user", "content": "1"}], Thing)  # cached: free
    assert len(one.server.requests) == 2


def test_limit_of_money_holds_for_requests_in_flight(case: Any) -> None:
    release = threading.Event()

    def answer(_: dict[str, Any]) -> Reply:
        release.wait(60)
        return GOOD

    # A call may cost 100 answer tokens at 10,000 per million: 1.0. It then costs 10 tokens: 0.1.
    one = case(answer, price_out=10000.0, max_tokens=100, max_cost=2.5, structured="text")

    def ask(number: int) -> str:
        try:
            one.model.ask([{"role": "user", "content": str(number)}], Thing)
        except BudgetSpent:
            return "spent"
        return "asked"

    with ThreadPoolExecutor(4) as threads:
        asked = as_completed([threads.submit(ask, number) for number in range(4)])
        assert [next(asked).result() for _ in range(2)] == ["spent", "spent"]  # while two are in flight
        release.set()
        assert [task.result() for task in asked] == ["asked", "asked"]
    assert one.model.spend.cost == pytest.approx(0.2)
    one.model.ask([{"role": "user", "content": "4"}], Thing)  # what was set aside is free again


def test_tokens_that_the_server_does_not_count_are_estimated(case: Any) -> None:
    one = case(script(Reply(GOOD.text, usage=None)))
    one.model.ask(ASKED, Thing)
    assert one.model.spend.estimated == 1
    assert (one.model.spend.tokens_in, one.model.spend.tokens_out) == (3, 6)  # 13 and 27 characters, by four


def test_the_key_goes_into_the_header_and_nowhere_else(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "sk-very-secret"
    monkeypatch.setenv("MY_KEY", secret + "\n")
    answers = script(
        Reply('{"name": "sk-very-secret", "parts": []}'),
        Reply(f"Incorrect API key provided: {secret}", status=401),
    )
    one = case(answers, key="MY_KEY")
    assert one.model.structured(ASKED, Thing).name == "***"
    assert one.server.requests[0][0]["Authorization"] == f"Bearer {secret}"
    with pytest.raises(
        LanguageModelFault, match=r"HTTP 401: Incorrect API key provided: \*\*\*; is MY_KEY set"
    ) as fault:
        one.model.ask([{"role": "user", "content": "again"}], Thing)
    assert secret not in str(fault.value)
    files = list(one._folder.glob("*"))
    assert len(files) == 1
    assert not any(secret in file.read_text() for file in files)


@pytest.mark.parametrize("key", ["sk-\nsecret", "sk-sécret"])
def test_a_key_that_is_none_is_named_but_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("MY_KEY", key)
    settings = LanguageModelSettings(url="http://127.0.0.1:1", model="m", key="MY_KEY")
    with pytest.raises(MemoryRecordError, match="MY_KEY") as error:
        LanguageModel(settings, tmp_path)
    assert "cret" not in str(error.value)


def test_a_damaged_cache_file_is_asked_again(case: Any) -> None:
    one = case(script(GOOD))
    one.model.ask(ASKED, Thing)
    (file,) = one._folder.glob("*.json")
    file.write_text('{"answer": {"te')
    assert one.again().ask(ASKED, Thing).cached is False
    assert one.again().ask(ASKED, Thing).cached is True


def test_bounds_are_taken_off_a_schema_and_properties_of_such_names_stay() -> None:
    class Odd(BaseModel):
        maximum: list[int] = Field(max_length=2)

    schema = without_lengths(Odd.model_json_schema())
    assert "maximum" in schema["properties"]
    assert "maxItems" not in schema["properties"]["maximum"]
