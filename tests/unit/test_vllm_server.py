"""The life of the server process, with a stand-in for the package ``vllm`` that starts at once."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from train.chat import ModelFault, ModelLost
from train.config import ConfigError, config_from
from train.policy import own_server
from train.vllm_server import VLLMServer, smallest_rank

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
                "extra": os.environ.get("EXTRA"), "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
                "level": os.environ.get("VLLM_LOGGING_LEVEL"),
                "threads": os.environ.get("OMP_NUM_THREADS"), "pids": [os.getpid(), engine.pid]}
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


def test_the_whole_group_is_killed_even_if_the_engine_ignores_the_signal(make, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # as TRL does
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
    assert json.loads(value(arguments, "--structured-outputs-config"))["disable_any_whitespace"] is True
    assert value(arguments, "--max-lora-rank") == "64"
    assert "--gpu-memory-utilization" in arguments
    assert "--block-size" not in arguments
    assert (told["lora"], told["extra"], told["level"]) == ("True", "1", "INFO")


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


def test_the_end_of_the_log_shows_errors_and_no_frames(make) -> None:  # type: ignore[no-untyped-def]
    """vLLM's last error only says that there is another above, behind a long traceback."""
    prefix = "(EngineCore pid=12) ERROR 12-01 00:34:15 [core.py:1433] "
    lines = [prefix + "Traceback (most recent call last):"]
    lines += [prefix + f'  File "core.py", line {n}, in f' for n in range(20)] + [prefix + "    raise MemoryError"]
    lines += [prefix + "MemoryError: 4 GiB are less than 8 GiB", "Traceback (most recent call last):"]
    lines += [f'  File "api.py", line {n}, in g\n    return h()\n           ^^^' for n in range(20)]
    lines += ["ValidationError: 1 error", "  Value error, see above"]
    with pytest.raises(ModelFault) as caught:
        make(f"print({chr(10).join(lines)!r}); raise SystemExit(1)").__enter__()
    assert str(caught.value).splitlines()[1:] == [
        prefix + "Traceback (most recent call last):",
        prefix + "MemoryError: 4 GiB are less than 8 GiB",
        "Traceback (most recent call last):",
        "ValidationError: 1 error",
        "  Value error, see above",
    ]


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
def wait(self):
    print(self._process.pid, flush=True)
    time.sleep(600)
module.VLLMServer._is_healthy = wait
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
    with pytest.raises(ConfigError, match=r"'vllm' needs vLLM, which is not installed; pip install 'saga-agents\[vllm"):
        make(SILENT, build=None)


@pytest.mark.parametrize(("rank", "allowed"), [(1, 1), (2, 8), (16, 16), (24, 32), (129, 256), (512, 512)])
def test_the_largest_rank_is_rounded_up_to_what_vllm_takes(rank: int, allowed: int) -> None:
    assert smallest_rank(rank) == allowed


def test_a_rank_that_vllm_does_not_serve_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lora\.rank: 513 is over 512"):
        smallest_rank(513)


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.vllm_server._POLL_S", 0.05)


async def pids_of(server: VLLMServer) -> list[int]:
    async with httpx.AsyncClient(trust_env=False) as client:
        pids: list[int] = (await client.get(server.url)).json()["pids"]
        return pids


@pytest.mark.usefixtures("_quick")
def test_a_server_that_died_is_started_once_for_all_who_wait(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    async def run() -> tuple[list[int], list[int], list[int]]:
        server = make("print('start of a server', flush=True)\n" + HEALTHY)
        await server.start()
        url, first = server.url, await pids_of(server)
        await server.revive()
        unharmed = await pids_of(server)
        os.kill(first[0], signal.SIGKILL)
        assert gone(first[:1])
        await asyncio.gather(*(server.revive() for _ in range(5)))
        second = await pids_of(server)
        assert server.url == url
        server.stop()
        return first, unharmed, second

    first, unharmed, second = asyncio.run(run())
    assert unharmed == first
    assert set(first).isdisjoint(second)
    assert gone(first)  # the engine too, which outlived its front end
    assert gone(second)
    assert (tmp_path / "logs/server.log").read_text().count("start of a server") == 2


@pytest.mark.usefixtures("_quick")
def test_the_event_loop_goes_on_while_a_server_starts(make) -> None:  # type: ignore[no-untyped-def]
    async def run() -> int:
        server = make("import time; time.sleep(1)\n" + HEALTHY)
        starting = asyncio.create_task(server.start())
        turns = 0
        while not starting.done():
            await asyncio.sleep(0.02)
            turns += 1
        await starting
        server.stop()
        return turns

    assert asyncio.run(run()) > 25


# Healthy on its first start only; the starts are counted in a file.
SHORT_LIVED = """
import os, pathlib
starts = pathlib.Path(os.environ["STARTS"])
starts.open("a").write("x")
if len(starts.read_text()) in DIES_ON:
    print("cannot allocate the cache")
    raise SystemExit(7)
"""


@pytest.mark.usefixtures("_quick")
def test_a_server_that_dies_again_and_again_is_lost(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    starts = tmp_path / "starts"

    async def run() -> list[str]:
        env = {"PYTHONPATH": str(tmp_path / "fake"), "STARTS": str(starts)}
        server = make(SHORT_LIVED.replace("DIES_ON", "range(2, 9)") + HEALTHY, env=env)
        await server.start()
        os.kill((await pids_of(server))[0], signal.SIGKILL)
        await asyncio.sleep(0.3)
        outcomes = await asyncio.gather(*(server.revive() for _ in range(3)), return_exceptions=True)
        server.stop()
        assert all(isinstance(outcome, ModelLost) for outcome in outcomes)
        return [str(outcome) for outcome in outcomes]

    messages = asyncio.run(run())
    assert starts.read_text() == "xxx"  # the first, and one for each of the first two deaths
    assert messages[0].startswith("vLLM died 3 times in a row, last with code 7, and is not started again")
    assert re.search(r"the end of .*server\.log:\n", messages[0])
    assert all(message.endswith("\ncannot allocate the cache\ncannot allocate the cache") for message in messages)


@pytest.mark.usefixtures("_quick")
def test_the_death_of_a_server_that_had_settled_does_not_count(  # type: ignore[no-untyped-def]
    make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.vllm_server._SETTLED_S", 0.0)
    monkeypatch.setattr("train.vllm_server._DEATHS", 1)

    async def run() -> list[int]:
        server = make(HEALTHY)
        await server.start()
        first = await pids_of(server)
        os.kill(first[0], signal.SIGKILL)
        assert gone(first[:1])
        await server.revive()
        second = await pids_of(server)
        server.stop()
        return [first[0], second[0]]

    first, second = asyncio.run(run())
    assert first != second


@pytest.mark.usefixtures("_quick")
def test_who_comes_while_a_start_is_under_way_waits_for_it(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The first call is cancelled with the episodes that it was for; the start goes on for the next one."""
    starts = tmp_path / "starts"

    async def run() -> list[int]:
        program = SHORT_LIVED.replace("DIES_ON", "()") + "import time; time.sleep(0.7)\n" + HEALTHY
        server = make(program, env={"PYTHONPATH": str(tmp_path / "fake"), "STARTS": str(starts)})
        await server.start()
        os.kill((await pids_of(server))[0], signal.SIGKILL)
        await asyncio.sleep(0.3)
        first = asyncio.create_task(server.revive())
        await asyncio.sleep(0.3)
        first.cancel()
        await server.revive()
        pids = await pids_of(server)
        server.stop()
        return pids

    assert len(asyncio.run(run())) == 2
    assert starts.read_text() == "xx"


def test_a_server_knows_nothing_of_the_processes_that_train(  # type: ignore[no-untyped-def]
    make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = ["RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_NAME"]
    ours += ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"]
    for name in (*ours, "HF_TOKEN"):
        monkeypatch.setenv(name, "1")
    program = f"import os; os.environ['EXTRA'] = ' '.join(n for n in {[*ours, 'HF_TOKEN']!r} if n in os.environ)\n"
    assert told_by(make(program + HEALTHY))["extra"] == "HF_TOKEN"


def told_by(server: VLLMServer) -> dict[str, Any]:
    with server:
        told: dict[str, Any] = httpx.get(server.url).json()
    return told


def test_a_run_s_own_server_serves_what_the_configuration_says(  # type: ignore[no-untyped-def]
    make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(HEALTHY, build="cpu")  # writes the stand-in package
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    model, adapter = tmp_path / "model", tmp_path / "policy-v0001"
    for folder, file, content in ((model, "config.json", {}), (adapter, "adapter_config.json", {"r": 24})):
        folder.mkdir()
        (folder / file).write_text(json.dumps(content))
    config = config_from(
        {
            "run": {"name": "demo"},
            "model": {"name": str(model), "engine": "vllm", "dtype": "float32"},
            "vllm": {"devices": "1", "threads": 2, "flags": ["--enforce-eager"]},
            "agent": {"context_tokens": 1500},
            "lora": {"rank": 8},
            "eval": {"tasks": "household/easy/eval:0-3"},
        },
        [],
    )
    log = tmp_path / "run" / "vllm.log"
    told = told_by(own_server(config, log, adapter, trainable=True))
    arguments = told["arguments"]
    assert value(arguments, "--model") == value(arguments, "--served-model-name") == str(model)
    assert value(arguments, "--dtype") == "float32"
    assert value(arguments, "--max-model-len") == "1500"
    assert (value(arguments, "--max-loras"), value(arguments, "--max-lora-rank")) == ("2", "32")
    assert "--enforce-eager" in arguments
    assert (told["lora"], told["devices"], told["threads"]) == ("True", "1", "2")
    assert "GET /health" in log.read_text()
    # The run's own rank when nothing was trained yet, and no adapters at all where none will come.
    assert value(told_by(own_server(config, log, None, trainable=True))["arguments"], "--max-lora-rank") == "8"
    assert "--enable-lora" not in told_by(own_server(config, log, None, trainable=False))["arguments"]
