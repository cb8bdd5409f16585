"""The life of the server process, with a stand-in for the package ``vllm`` that starts at once."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from train.chat import ModelFault
from train.config import ConfigError
from train.vllm_server import VLLMServer

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(sys.platform != "linux", reason="process groups are inspected through /proc"),
]

# Starts an "engine" that ignores SIGTERM, then answers every GET with its own arguments.
HEALTHY = """
import http.server, json, os, subprocess, sys
engine = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"],
    stdout=subprocess.PIPE)
engine.stdout.readline()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        told = {"arguments": sys.argv[1:], "lora": os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
                "extra": os.environ.get("EXTRA"), "pids": [os.getpid(), engine.pid]}
        self.wfile.write(json.dumps(told).encode())
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
DYING = "print('first'); print('CUDA out of memory'); raise SystemExit(3)"
SILENT = "import time; print('loading', flush=True); time.sleep(600)"


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def make(program: str, *, build: str = "gpu", **options: object) -> VLLMServer:
        package = tmp_path / "fake/vllm/entrypoints/openai"
        package.mkdir(parents=True)
        for folder in (package, package.parent, package.parent.parent):
            (folder / "__init__.py").touch()
        (package / "api_server.py").write_text(program)
        monkeypatch.setattr("train.vllm_server.vllm_build", lambda: build)
        env = {"PYTHONPATH": str(tmp_path / "fake"), "EXTRA": "1"}
        settings: dict[str, object] = {"dtype": "bfloat16", "log": tmp_path / "logs/server.log", "env": env}
        return VLLMServer("some/model", **(settings | options))  # type: ignore[arg-type]

    return make


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def value(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_the_whole_group_is_killed_even_if_the_engine_ignores_the_signal(make) -> None:  # type: ignore[no-untyped-def]
    with make(HEALTHY, served_name="policy", max_lora_rank=64) as server:
        told = httpx.get(server.url).json()
        assert all(map(alive, told["pids"]))
    assert gone(told["pids"])
    server.stop()
    arguments = told["arguments"]
    assert value(arguments, "--model") == "some/model"
    assert value(arguments, "--served-model-name") == server.name == "policy"
    assert value(arguments, "--logprobs-mode") == "processed_logprobs"
    assert value(arguments, "--generation-config") == "vllm"
    assert value(arguments, "--max-lora-rank") == "64"
    assert "--gpu-memory-utilization" in arguments
    assert "--block-size" not in arguments
    assert (told["lora"], told["extra"]) == ("True", "1")


def test_the_block_kills_the_server_when_it_raises(make) -> None:  # type: ignore[no-untyped-def]
    told: dict[str, object] = {}

    def interrupted() -> None:
        with make(HEALTHY, build="cpu", max_loras=0) as server:
            told.update(httpx.get(server.url).json())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    pids, arguments = told["pids"], told["arguments"]
    assert isinstance(pids, list)
    assert isinstance(arguments, list)
    assert gone(pids)
    assert value(arguments, "--block-size") == "32"
    assert "--enable-lora" not in arguments
    assert told["lora"] is None


def test_a_server_that_dies_shows_the_end_of_its_log(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ModelFault, match=r"(?s)ended with code 3 .*server\.log:\nfirst\nCUDA out of memory"):
        make(DYING).__enter__()


def test_a_server_that_never_gets_healthy_is_given_up_and_killed(make) -> None:  # type: ignore[no-untyped-def]
    server = make(SILENT, start_s=1.5)
    with pytest.raises(ModelFault, match="not healthy within 2 s"):
        server.__enter__()
    assert server._process is None


def test_a_taken_port_is_named(make) -> None:  # type: ignore[no-untyped-def]
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is taken"):
            make(SILENT, port=port).__enter__()


def test_the_server_ends_with_a_parent_that_is_killed(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    make(SILENT)  # writes the stand-in package
    program = f"""
import pathlib, time, train.vllm_server as module
module.vllm_build = lambda: "gpu"
server = module.VLLMServer("m", dtype="bfloat16", log=pathlib.Path({str(tmp_path / "log")!r}),
                           env={{"PYTHONPATH": {str(tmp_path / "fake")!r}}})
def wait(self, process):
    print(process.pid, flush=True)
    time.sleep(600)
module.VLLMServer._wait_for_health = wait
server.__enter__()
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    assert gone([pid])


def test_without_vllm_the_error_says_what_to_install(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        make(SILENT, build=None)
