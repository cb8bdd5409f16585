import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory import embedding
from memory.embedding import API_KEY, CachedEmbedder, EmbeddingFault, HashingEmbedder, ServerEmbedder, make_embedder
from memory.records import MemoryRecordError
from memory.settings import EmbedderSettings

pytestmark = pytest.mark.unit


def test_hashing_brings_texts_with_common_words_together() -> None:
    vectors = HashingEmbedder().embed(["open the fridge", "the fridge is open", "a book on a desk", ""])
    assert vectors.shape == (4, 256)
    assert np.linalg.norm(vectors[:3], axis=1) == pytest.approx(1.0)
    near, far = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert near > 0.5 > far
    assert not vectors[3].any()


@given(st.lists(st.text(), max_size=4))
def test_any_text_has_a_vector_and_equal_texts_equal_ones(texts: list[str]) -> None:
    vectors = HashingEmbedder().embed([*texts, *texts])
    assert np.isfinite(vectors).all()
    assert (vectors[: len(texts)] == vectors[len(texts) :]).all()


class Counting(HashingEmbedder):
    def __init__(self) -> None:
        self.asked: list[str] = []

    def embed(self, texts: Any) -> embedding.Vectors:
        self.asked += texts
        return super().embed(texts)


def test_a_cache_asks_once_for_each_text_and_outlives_the_process(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "vectors.db"
    first = Counting()
    vectors = CachedEmbedder(first, file).embed(["a", "b", "a"])
    assert sorted(first.asked) == ["a", "b"]
    assert (vectors[0] == vectors[2]).all()
    second = Counting()
    cached = CachedEmbedder(second, file)
    assert (cached.embed(["c", "b", "a"])[1:] == vectors[[1, 0]]).all()
    assert second.asked == ["c"]
    assert cached.embed([]).shape[0] == 0
    second.name = "another model"
    CachedEmbedder(second, file).embed(["a"])
    assert second.asked == ["c", "a"]


class Server(BaseHTTPRequestHandler):
    """Answers with the statuses in ``script`` first, then with vectors (length of the text, 1), in reverse order."""

    script: ClassVar[list[tuple[int, bytes]]] = []
    requests: ClassVar[list[dict[str, Any]]] = []
    keys: ClassVar[list[str | None]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(body)
        self.keys.append(self.headers.get("Authorization"))
        rows = [{"index": i, "embedding": [len(text), 1]} for i, text in enumerate(body["input"])][::-1]
        status, answer = self.script.pop(0) if self.script else (200, json.dumps({"data": rows}).encode())
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(embedding, "_FIRST_WAIT_S", 0.001)
    monkeypatch.setenv(API_KEY, "secret-7")
    Server.script, Server.requests, Server.keys = [], [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_a_server_is_asked_in_batches_with_the_key_from_the_environment(url: str) -> None:
    vectors = ServerEmbedder(url, "m", batch=2).embed(["abc", "", "abc"])
    # (3, 1) / sqrt(10), (0, 1), (3, 1) / sqrt(10)
    assert vectors == pytest.approx(np.array([[0.94868, 0.31623], [0, 1], [0.94868, 0.31623]]), abs=1e-5)
    assert Server.requests == [{"model": "m", "input": ["abc", ""]}, {"model": "m", "input": ["abc"]}]
    assert Server.keys == ["Bearer secret-7"] * 2


def test_overload_is_waited_for(url: str) -> None:
    Server.script = [(429, b"slow down"), (500, b"oops"), (503, b"")]
    assert len(ServerEmbedder(url, "m").embed(["a"])) == 1
    assert len(Server.requests) == 4


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([(500, b"")] * 4, "status 500, 4 times"),
        ([(401, b"who are you")], "status 401: who are you"),
        ([(200, b"{]")], "without embeddings"),
        ([(200, b'{"data": [{"index": 0}]}')], "without embeddings"),
        ([(200, b'{"data": [{"index": 0, "embedding": "ab"}]}')], "without embeddings"),
        ([(200, b'{"data": []}')], "for 1 texts"),
        ([(200, b'{"data": [{"index": 0, "embedding": [NaN]}]}')], "for 1 texts"),
    ],
)
def test_what_a_server_does_wrong_is_named_and_the_key_is_not(
    url: str, script: list[tuple[int, bytes]], message: str
) -> None:
    Server.script = script
    with pytest.raises(EmbeddingFault, match=message) as raised:
        ServerEmbedder(url, "m").embed(["a"])
    assert "secret-7" not in str(raised.value)


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "_FIRST_WAIT_S", 0.001)
    with pytest.raises(EmbeddingFault, match="ConnectError, 4 times; check that it runs"):
        ServerEmbedder("http://127.0.0.1:9", "m").embed(["a"])
    with pytest.raises(MemoryRecordError, match="write http://host:port"):
        ServerEmbedder("localhost", "m")


def test_settings_name_the_embedder() -> None:
    assert make_embedder(EmbedderSettings(kind="hashing")).name == "hashing-256"
    with pytest.raises(ValueError, match="kind 'server' needs url and model"):
        EmbedderSettings(kind="server", url="http://a")
