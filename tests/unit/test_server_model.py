"""ServerModel against a small HTTP server that answers (and misbehaves) as told."""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_tokenizer
from train.chat import ModelFault, ModelLost, Sampling
from train.config import ConfigError
from train.server_model import ServerModel
from train.tokens import TokenCodec

pytestmark = pytest.mark.unit

CODEC = TokenCodec(tiny_tokenizer())
PROMPT = CODEC.start(None, "Hi")
Answer = tuple[int, dict[str, Any] | str]


def completion(body: dict[str, Any], **changes: Any) -> Answer:
    """What vLLM answers to a completion: "go" and the end of turn."""
    ids = CODEC.reply("go")
    best = {"token_id:1": -1.0 / (body["temperature"] or 1.0)}
    logprobs = {"token_logprobs": [-0.5, -0.25, -0.125], "top_logprobs": [best] * 3}
    choice = {"token_ids": ids, "prompt_token_ids": body["prompt"], "logprobs": logprobs, "finish_reason": "stop"}
    return 200, {"choices": [{**choice, **changes}]}


class FakeServer:
    """``answers`` maps a path to a function of the request's body; ``calls`` lists (path, body, headers)."""

    def __init__(self) -> None:
        self.served = ["policy"]
        self.calls: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.answers: dict[str, Callable[[dict[str, Any]], Answer]] = {
            "/v1/models": lambda body: (200, {"data": [{"id": name} for name in self.served]}),
            "/v1/completions": completion,
            "/v1/load_lora_adapter": self._load,
            "/v1/unload_lora_adapter": self._unload,
        }
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(size) or b"{}")
                fake.calls.append((self.path, body, {k.lower(): v for k, v in self.headers.items()}))
                status, data = fake.answers[self.path](body)
                if status == 0:
                    return  # the connection is lost
                text = (data if isinstance(data, str) else json.dumps(data)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = answer  # noqa: N815

            def log_message(self, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def _load(self, body: dict[str, Any]) -> Answer:
        if body["lora_name"] in self.served:
            return 400, {"error": {"message": f"The lora adapter '{body['lora_name']}' has already been loaded."}}
        self.served.append(body["lora_name"])
        return 200, {}

    def _unload(self, body: dict[str, Any]) -> Answer:
        self.served.remove(body["lora_name"])
        return 200, {}

    def paths(self) -> list[str]:
        return [path for path, _, _ in self.calls]

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


@pytest.fixture
def second() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.server_model._FIRST_WAIT_S", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def use(urls: list[str], action: Callable[[ServerModel], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        model = ServerModel(urls, "policy", options.pop("codec", CODEC), **options)
        try:
            return await action(model)
        finally:
            await model.close()
            await model.close()

    return asyncio.run(run())


def failing(times: int, status: int, message: str = "busy") -> Callable[[dict[str, Any]], Answer]:
    left = [times]

    def answer(body: dict[str, Any]) -> Answer:
        left[0] -= 1
        return (status, {"error": {"message": message}}) if left[0] >= 0 else completion(body)

    return answer


def test_every_sampling_parameter_is_sent_and_ids_come_back(server: FakeServer) -> None:
    sampling = Sampling(max_tokens=7, temperature=0.4, top_p=0.9, top_k=5, seed=11)
    generation = use([server.url + "/v1/"], lambda model: model.complete(PROMPT, sampling, "a"))
    assert generation.token_ids == CODEC.reply("go")
    assert generation.logprobs == [-0.5, -0.25, -0.125]
    assert (generation.text, generation.finish, generation.adapter) == ("go", "stop", "base")
    assert generation.prompt_tokens == len(PROMPT)
    ((path, body, headers),) = server.calls
    assert path == "/v1/completions"
    assert "authorization" not in headers
    assert body == {
        "model": "policy",
        "prompt": PROMPT,
        "max_tokens": 7,
        "temperature": 0.4,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 11,
        "stop_token_ids": [CODEC.eot_id],
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }


def test_a_completion_without_the_end_of_turn_token_counts_as_cut(server: FakeServer) -> None:
    logprobs = {"token_logprobs": [-1.0]}
    for reason in ("length", "stop"):
        server.answers["/v1/completions"] = lambda body, reason=reason: completion(
            body, token_ids=[5], logprobs=logprobs, finish_reason=reason
        )
        assert use([server.url], lambda model: model.complete(PROMPT, Sampling(1), "a")).finish == "length"


@pytest.mark.parametrize("status", [0, 429, 500, 503])
def test_overload_server_errors_and_lost_connections_are_retried(server: FakeServer, status: int) -> None:
    server.answers["/v1/completions"] = failing(2, status)
    assert use([server.url], lambda model: model.complete(PROMPT, Sampling(5), "a")).text == "go"
    assert server.paths() == ["/v1/completions"] * 3


def test_retries_end_with_a_fault_that_names_the_last_problem(server: FakeServer) -> None:
    server.answers["/v1/completions"] = failing(10**6, 503, "engine\n dead")
    started = time.monotonic()
    with pytest.raises(ModelFault, match=r"http://127.*completions failed for 0 s, last with HTTP 503: engine dead$"):
        use([server.url], lambda model: model.complete(PROMPT, Sampling(5), "a"), retry_s=0.3)
    assert 0.1 < time.monotonic() - started < 3.0


def test_the_time_that_a_lost_server_takes_to_come_back_is_no_retrying(server: FakeServer) -> None:
    """The second call fails after longer than ``retry_s`` and is tried again all the same."""
    revivals = []

    def slow(body: dict[str, Any]) -> Answer:
        time.sleep(0.4)
        server.answers["/v1/completions"] = failing(2, 0)
        return 0, {}

    async def revive() -> None:
        revivals.append(len(server.calls))
        await asyncio.sleep(0.4)

    server.answers["/v1/completions"] = slow
    text = use([server.url], lambda model: model.complete(PROMPT, Sampling(5), "a"), retry_s=0.3, revive=revive).text
    assert text == "go"
    assert revivals == [1, 2, 3]


def test_a_server_that_is_lost_ends_the_call_at_once(server: FakeServer) -> None:
    async def revive() -> None:
        raise ModelLost("died three times")

    server.answers["/v1/completions"] = failing(10**6, 0)
    with pytest.raises(ModelLost, match="died three times"):
        use([server.url], lambda model: model.complete(PROMPT, Sampling(5), "a"), revive=revive)
    assert len(server.calls) == 1


def test_a_refused_request_is_a_fault_at_once(server: FakeServer) -> None:
    server.answers["/v1/completions"] = failing(1, 400, "maximum context length is 2048")
    with pytest.raises(ModelFault, match="HTTP 400: maximum context length is 2048"):
        use([server.url], lambda model: model.complete(PROMPT, Sampling(5), "a"))
    assert len(server.calls) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": None}, "ignores return_token_ids"),
        ({"prompt_token_ids": None}, "ignores return_token_ids"),
        ({"prompt_token_ids": [1, 2]}, f"changed the prompt: {len(PROMPT)} ids sent, 2 taken"),
        ({"token_ids": [], "logprobs": None}, "0 tokens with finish_reason 'stop'"),
        ({"finish_reason": "abort"}, "3 tokens with finish_reason 'abort'"),
        ({"logprobs": None}, "3 tokens but 0 log-probabilities"),
        ({"logprobs": {"token_logprobs": [None, -1.0, -1.0]}}, "log-probabilities"),
    ],
)
def test_an_answer_unfit_for_training_is_a_fault(server: FakeServer, changes: dict[str, Any], message: str) -> None:
    server.answers["/v1/completions"] = lambda body: completion(body, **changes)
    with pytest.raises(ModelFault, match=message):
        use([server.url], lambda model: model.complete(PROMPT, Sampling(5), "a"))


def test_an_absent_model_lists_what_is_served(server: FakeServer) -> None:
    server.served = ["qwen", "llama"]
    server.answers["/v1/completions"] = failing(1, 404, "no such model")
    with pytest.raises(ModelFault, match=r"does not serve 'policy' \(it serves 'qwen', 'llama'\); set model.name"):
        use([server.url], lambda model: model.complete(PROMPT, Sampling(5), "a"))
    with pytest.raises(ConfigError, match=r"does not serve 'policy' \(it serves 'qwen', 'llama'\)"):
        use([server.url], lambda model: model.check())


def test_check_passes_a_fit_server_and_refuses_raw_log_probabilities(server: FakeServer) -> None:
    use([server.url], lambda model: model.check())
    top = {"token_logprobs": [-1.0] * 3, "top_logprobs": [{"x": -1.0, "y": -2.0}] * 3}
    server.answers["/v1/completions"] = lambda body: completion(body, logprobs=top)
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        use([server.url], lambda model: model.check())


def test_check_refuses_a_context_that_the_server_cuts(server: FakeServer) -> None:
    server.answers["/v1/models"] = lambda body: (200, {"data": [{"id": "policy", "max_model_len": 1024}]})
    use([server.url], lambda model: model.check(1024))
    with pytest.raises(
        ConfigError,
        match=r"^agent.context_tokens: 2048, but server http://127\S+ serves 'policy' with at most 1024 tokens; "
        r"lower it to 1024 or start vLLM with --max-model-len 2048$",
    ):
        use([server.url], lambda model: model.check(2048))


@pytest.mark.parametrize("status", [200, 404])
def test_check_passes_what_a_server_does_not_tell(server: FakeServer, status: int) -> None:
    server.answers["/metrics"] = lambda body: (status, {"detail": "no metrics"})
    use([server.url], lambda model: model.check(10**6, 2))


def test_check_refuses_a_server_with_too_few_adapters(server: FakeServer) -> None:
    metrics = "# TYPE vllm:lora_requests_info gauge\n"
    metrics += 'vllm:lora_requests_info{max_lora="1",running_lora_adapters="",waiting_lora_adapters=""} 1.7e+09\n'
    server.answers["/metrics"] = lambda body: (200, metrics)
    use([server.url], lambda model: model.check(0, 1))
    with pytest.raises(
        ConfigError,
        match=r"holds 1 adapters in a batch, but grpo.staleness 1 needs 2; start vLLM with --max-loras 2 or set "
        r"grpo.staleness=0$",
    ):
        use([server.url], lambda model: model.check(0, 2))
    server.answers["/metrics"] = lambda body: (200, metrics.replace('"1"', '"2"'))
    use([server.url], lambda model: model.check(0, 2))


def test_something_that_is_no_such_server_is_a_clear_fault(server: FakeServer) -> None:
    server.answers["/v1/completions"] = lambda body: (200, {"hello": "world"})
    with pytest.raises(ModelFault, match="holds no choices"):
        use([server.url], lambda model: model.complete(PROMPT, Sampling(5), "a"))
    for url in ("localhost:8000", "http://host:80a0", "http://"):
        with pytest.raises(ConfigError, match=f"'{url}' is no address of a server"):
            ServerModel([url], "policy", CODEC)
    with pytest.raises(ConfigError, match=r"model.urls: \[\]"):
        ServerModel([], "policy", CODEC)


def test_a_conversation_stays_and_new_ones_go_to_the_least_loaded(server: FakeServer, second: FakeServer) -> None:
    async def play(model: ServerModel) -> None:
        for conversation in ("a", "b", "a", "b", "a"):
            await model.complete(PROMPT, Sampling(5), conversation)
        assert (len(server.calls), len(second.calls)) == (3, 2)
        model.release("b")
        model.release("b")
        for conversation in ("c", "d", "e"):  # second holds none, then both one, then the first listed
            await model.complete(PROMPT, Sampling(5), conversation)
        assert (len(server.calls), len(second.calls)) == (4, 4)

    use([server.url, second.url], play)


def test_new_conversations_avoid_a_dead_server(server: FakeServer, second: FakeServer) -> None:
    server.answers["/v1/completions"] = failing(10**6, 503)

    async def play(model: ServerModel) -> None:
        with pytest.raises(ModelFault):
            await model.complete(PROMPT, Sampling(5), "a")
        model.release("a")
        for conversation in ("b", "c", "d"):
            await model.complete(PROMPT, Sampling(5), conversation)

    use([server.url, second.url], play, retry_s=0.05)
    assert len(second.calls) == 3


def adapter(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def test_an_adapter_goes_to_every_server_and_the_old_one_leaves_after_its_last_conversation(
    server: FakeServer, second: FakeServer, tmp_path: Path
) -> None:
    old, new = adapter(tmp_path / "one", b"1"), adapter(tmp_path / "two", b"2")

    async def play(model: ServerModel) -> None:
        await model.load_adapter(old, "policy-v0001")
        assert model.adapter == "policy-v0001"
        for fake in (server, second):
            assert fake.calls[0][1]["lora_path"] == str(old)
            assert fake.served[1].startswith("policy-v0001-")
        assert (await model.complete(PROMPT, Sampling(5), "a")).adapter == "policy-v0001"
        await model.load_adapter(new, "policy-v0002")
        for conversation, version in (("a", 1), ("b", 2), ("a", 1)):  # "a" keeps the version that it began with
            generation = await model.complete(PROMPT, Sampling(5), conversation)
            fake = server if conversation == "a" else second
            assert generation.adapter == f"policy-v000{version}"
            assert fake.calls[-1][1]["model"] == fake.served[version]
        model.release("a")
        while len(server.served) + len(second.served) > 4:
            await asyncio.sleep(0.01)
        for fake in (server, second):
            assert [name.rsplit("-", 1)[0] for name in fake.served] == ["policy", "policy-v0002"]

    use([server.url, second.url], play)
    assert server.served == second.served == ["policy"]  # a client that ends leaves nothing behind


def test_a_restarted_server_gets_the_adapter_again(server: FakeServer, tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> Answer:
        return completion(body) if body["model"] in server.served else (404, {"error": {"message": "no such model"}})

    async def play(model: ServerModel) -> None:
        await model.load_adapter(adapter(tmp_path / "one", b"1"), "policy-v0001")
        served = list(server.served)
        server.served = ["policy"]
        assert (await model.complete(PROMPT, Sampling(5), "a")).adapter == "policy-v0001"
        assert server.served == served
        server.served = ["policy"]
        server.answers["/v1/load_lora_adapter"] = failing(1, 404, "No adapter found for /x")
        with pytest.raises(ModelFault, match=r"does not see the adapter folder .*one"):
            await model.complete(PROMPT, Sampling(5), "a")

    server.answers["/v1/completions"] = answer
    use([server.url], play)


def test_a_version_of_equal_content_is_reused_and_of_other_content_is_not(server: FakeServer, tmp_path: Path) -> None:
    async def play(model: ServerModel) -> None:
        counts = []
        for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
            await model.load_adapter(adapter(tmp_path / name, content), "policy-v0001")
            await model.complete(PROMPT, Sampling(5), name)  # keeps its version loaded
            counts.append(len(server.served))
        assert counts == [2, 2, 3]  # the base, and one or two contents

    use([server.url], play)


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (404, "Not Found", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        (404, "Loading lora x failed: No adapter found for /x", "does not see the adapter folder .*same path"),
        (500, "LoRA rank 64 is greater than max_lora_rank 16", "refuses the adapter .*max_lora_rank 16"),
    ],
)
def test_a_failed_load_says_why_and_keeps_the_old_adapter(
    server: FakeServer, tmp_path: Path, status: int, message: str, expected: str
) -> None:
    folder = adapter(tmp_path / "one", b"1")
    server.answers["/v1/load_lora_adapter"] = lambda body: (status, {"error": {"message": message}})

    async def play(model: ServerModel) -> str:
        with pytest.raises(ConfigError, match=expected):
            await model.load_adapter(folder, "policy-v0001")
        return (await model.complete(PROMPT, Sampling(5), "a")).adapter

    assert use([server.url], play) == "base"


def test_a_folder_without_an_adapter_is_refused_here(server: FakeServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing"):
        use([server.url], lambda model: model.load_adapter(tmp_path / "nothing", "policy-v0001"))
    assert server.calls == []


def chat_answer(body: dict[str, Any]) -> Answer:
    choice = {"message": {"content": "Hello."}, "finish_reason": "stop"}
    return 200, {"choices": [choice], "usage": {"prompt_tokens": 9}}


def test_chat_needs_no_tokenizer(server: FakeServer) -> None:
    server.answers["/v1/chat/completions"] = chat_answer
    messages = [{"role": "user", "content": "Hi"}]
    generation = use([server.url], lambda model: model.chat(messages, Sampling(5, seed=3)), codec=None)
    assert (generation.text, generation.finish, generation.prompt_tokens) == ("Hello.", "stop", 9)
    ((_, body, _),) = server.calls
    assert body == {
        "model": "policy",
        "messages": messages,
        "max_tokens": 5,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": 3,
    }
    with pytest.raises(ModelFault, match="without a tokenizer"):
        use([server.url], lambda model: model.complete(PROMPT, Sampling(5), "a"), codec=None)


def test_the_key_is_sent_and_never_told(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    server.answers["/v1/chat/completions"] = lambda body: (401, {"error": {"message": "bad key sk-secret"}})
    with caplog.at_level("DEBUG"), pytest.raises(ModelFault) as caught:
        use([server.url], lambda model: model.chat([], Sampling(5)), codec=None)
    assert server.calls[0][2]["authorization"] == "Bearer sk-secret"
    assert str(caught.value).endswith("HTTP 401: bad key ***")
    assert "sk-secret" not in caplog.text
