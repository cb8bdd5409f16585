"""An OpenAI-compatible HTTP server on a real socket whose answers a test decides."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """``text``: the message's content. ``raw``: the whole body instead. ``delay_s``: before anything is sent."""

    text: str | None = None
    status: int = 200
    finish: str = "stop"
    headers: dict[str, str] = field(default_factory=dict)
    raw: str | None = None
    delay_s: float = 0.0
    usage: dict[str, Any] | None = field(default_factory=lambda: {"prompt_tokens": 100, "completion_tokens": 10})
    hang_up: bool = False
    """Close the connection without an answer."""

    def body(self) -> bytes:
        if self.raw is not None:
            return self.raw.encode()
        if self.status != 200:
            return json.dumps({"error": {"message": self.text or "no"}}).encode()
        choice = {"index": 0, "message": {"role": "assistant", "content": self.text}, "finish_reason": self.finish}
        return json.dumps({"choices": [choice], "usage": self.usage}).encode()


class ScriptedServer:
    """``with ScriptedServer(answer) as server:`` listens at ``server.url``; ``answer`` maps a body to a reply.

    ``requests``: (headers, body) of each, in the order of arrival.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], Reply]) -> None:
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        lock = threading.Lock()
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    requests.append((dict(self.headers), body))
                    reply = answer(body)
                if self.path != "/v1/chat/completions":
                    reply = Reply("no such path", status=404)
                time.sleep(reply.delay_s)
                if reply.hang_up:
                    self.close_connection = True
                    return
                data = reply.body()
                try:
                    self.send_response(reply.status)
                    for name, value in {"Content-Length": str(len(data)), **reply.headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    self.close_connection = True  # the client has given up waiting

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def script(*replies: Reply) -> Callable[[dict[str, Any]], Reply]:
    """The replies in their order, whatever is asked; the last one again and again."""
    left = list(replies)
    return lambda _: left.pop(0) if len(left) > 1 else left[0]
