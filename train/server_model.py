"""An OpenAI-compatible server as a chat model: vLLM token in and token out, or an API by messages.

The policy's calls go to ``/v1/completions`` with a list of token ids and ask for ids back (vLLM's
``return_token_ids``); every sampling parameter is sent, so that no ``generation_config.json`` default of the server
applies. The server's log-probabilities must be those of the sampling distribution: start vLLM with
``--logprobs-mode processed_logprobs`` (:meth:`ServerModel.check` tests it).

New adapter versions are pushed at run time (``/v1/load_lora_adapter``) under a name that holds their content hash:
vLLM's prefix cache is keyed by name, and a long-lived server may hold another run's ``policy-v0001``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from train.chat import Generation, ModelFault, Sampling
from train.config import ConfigError
from train.tokens import TokenCodec

API_KEY = "OPENAI_API_KEY"
"""Environment variable whose value, if set, is sent as the bearer token."""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 8.0
_AVOID_S = 60.0
_MAX_LORAS = re.compile(r'^vllm:lora_requests_info\{[^}]*max_lora="(\d+)"', re.MULTILINE)


@dataclass(frozen=True)
class _Home:
    """Where a conversation began: its server, and the adapter as the server names it and as the run does."""

    server: _Server
    served: str
    adapter: str


@dataclass(eq=False)
class _Server:
    url: str
    conversations: int = 0
    avoid_until: float = 0.0
    """Loop time before which new conversations go elsewhere: a dead server is always the least loaded one."""


class ServerModel:
    """A model behind one or several equal servers.

    A conversation stays with the server it began on (its prefix cache lies there) and with the adapter version that was
    in use then; a new one goes to the server that holds the fewest. Overload (429), server errors (5xx) and lost
    connections are retried with growing waits.

    Args:
        urls: base addresses, with or without a trailing ``/v1``.
        model: name under which the servers serve the base model.
        codec: None for a model without token access (:meth:`chat` only).
        retry_s: seconds after its first failure until a call is not tried again.
        timeout_s: seconds that one try may take.
        revive: awaited when a connection was lost; returns once the server, which it may have started again, is
            healthy. The time does not count towards ``retry_s``. What it raises ends the call.
    """

    def __init__(
        self,
        urls: list[str],
        model: str,
        codec: TokenCodec | None,
        *,
        retry_s: float = 60.0,
        timeout_s: float = 600.0,
        revive: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        if not urls:
            raise ConfigError("model.urls: [] names no server; give for example [http://127.0.0.1:8000]")
        for url in urls:
            if not _is_http(url):
                raise ConfigError(f"model.urls: {url!r} is no address of a server; write http://host:port")
        self.name = model
        self.adapter = "base"
        self._codec = codec
        self._retry_s = retry_s
        self._revive = revive
        self._servers = [_Server(url.rstrip("/").removesuffix("/v1")) for url in urls]
        self._home: dict[str, _Home] = {}
        self._served = model
        self._folders: dict[str, Path] = {}  # of the adapters pushed and not yet unloaded, by served name
        self._conversations: Counter[str] = Counter()  # that hold an adapter, by served name
        self._retired: set[str] = set()
        self._unloads: set[asyncio.Task[None]] = set()
        self._chats = itertools.count()
        self._key = os.environ.get(API_KEY, "")
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(timeout_s, connect=10.0, pool=None),
            limits=httpx.Limits(max_connections=None),
        )

    async def check(self, context_tokens: int = 0, adapters: int = 0) -> None:
        """Ask every server whether it can serve this model as training needs it.

        Args:
            context_tokens: prompt and completion together that it must take.
            adapters: that must be active in one batch.

        What a server does not tell (an API its context, a server without the metrics of vLLM its adapters) passes.

        Raises:
            ConfigError: a server lacks the model, takes a shorter context or fewer adapters, returns no token ids, or
                gives raw log-probabilities.
            ModelFault: a server does not answer.
        """
        for server in self._servers:
            served = await self._served_by(server)
            if self.name not in served:
                raise ConfigError(self._absent(server, self.name, list(served)))
            longest = served[self.name].get("max_model_len")
            if isinstance(longest, int) and longest < context_tokens:
                raise ConfigError(
                    f"agent.context_tokens: {context_tokens}, but server {server.url} serves {self.name!r} with at "
                    f"most {longest} tokens; lower it to {longest} or start vLLM with --max-model-len {context_tokens}"
                )
            if self._codec is not None:
                await self._check_logprobs(server, self._codec)
            if adapters > 1:
                await self._check_adapters(server, adapters)  # after a completion: vLLM counts from the first one on

    async def complete(self, prompt_ids: list[int], sampling: Sampling, conversation: str) -> Generation:
        """Continue ``prompt_ids``, shape (L,). See :meth:`train.chat.ChatModel.complete`. Raises ModelFault."""
        codec = self._codec
        if codec is None:
            raise ModelFault(f"model {self.name!r} was opened without a tokenizer; call chat() or give a codec")
        home = self._home_of(conversation)
        body = _completion_body(home.served, prompt_ids, sampling, codec)
        choice = _first_choice(home.server, await self._post(home.server, "/v1/completions", body))
        ids, logprobs = self._tokens(home.server, choice, prompt_ids)
        return Generation(
            text=codec.decode(ids),
            token_ids=ids,
            logprobs=logprobs,
            # The end-of-turn token decides: a server may stop at other tokens, and then the turn is not closed.
            finish="stop" if ids[-1] == codec.eot_id else "length",
            prompt_tokens=len(prompt_ids),
            adapter=home.adapter,
        )

    async def chat(self, messages: list[dict[str, str]], sampling: Sampling) -> Generation:
        """Answer ``messages`` (role and content) by the server's own chat template; text only. Raises ModelFault."""
        conversation = f"chat {next(self._chats)}"
        home = self._home_of(conversation)
        body: dict[str, Any] = {
            "model": home.served,
            "messages": messages,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        }
        if sampling.top_k:
            body["top_k"] = sampling.top_k  # vLLM's; APIs that lack it refuse the field
        try:
            answer = await self._post(home.server, "/v1/chat/completions", body)
        finally:
            self.release(conversation)
        choice = _first_choice(home.server, answer)
        text = (choice.get("message") or {}).get("content")
        if not isinstance(text, str):
            raise ModelFault(
                f"server {home.server.url}: the answer holds no text (finish {choice.get('finish_reason')!r})"
            )
        return Generation(
            text=text,
            finish="length" if choice.get("finish_reason") == "length" else "stop",
            prompt_tokens=(answer.get("usage") or {}).get("prompt_tokens", 0),
            adapter=home.adapter,
        )

    async def load_adapter(self, folder: Path, version: str) -> None:
        """Push the LoRA adapter in ``folder`` to every server and use it for conversations that begin from now on.

        The servers read ``folder`` themselves, under the same path. The version used before is unloaded once its last
        conversation was released. When this raises, that version stays in use. A server that lacks the adapter later,
        because it was restarted, is given it again.

        Raises:
            ConfigError: no adapter in ``folder``, a server that does not see it, or refuses it (rank, base model), or
                that does not allow loading at run time.
            ModelFault: a server does not answer.
        """
        from train.adapters import adapter_hash  # imports torch, which a client of an API does without

        folder = folder.resolve()
        digest = await asyncio.to_thread(adapter_hash, folder)
        served = f"{version}-{digest[:12]}"
        await asyncio.gather(*self._unloads)  # one of them may be of this very version, used again
        pushes = (self._push(server, served, folder) for server in self._servers)
        for outcome in await asyncio.gather(*pushes, return_exceptions=True):
            if outcome is not None:
                raise outcome
        previous, self._served, self.adapter = self._served, served, version
        self._folders[served] = folder
        self._retired.discard(served)
        if previous not in (self.name, served):
            self._retired.add(previous)
            self._unload_if_idle(previous)

    def release(self, conversation: str) -> None:
        """Forget the conversation; the last one of an outdated adapter has it unloaded."""
        home = self._home.pop(conversation, None)
        if home is not None:
            home.server.conversations -= 1
            self._conversations[home.served] -= 1
            if home.served in self._retired:
                self._unload_if_idle(home.served)

    async def close(self) -> None:
        """Unload the adapters that were pushed, so that a long-lived server does not gather them."""
        await asyncio.gather(*self._unloads, return_exceptions=True)
        await asyncio.gather(*map(self._unload, list(self._folders)))
        await self._client.aclose()

    def _home_of(self, conversation: str) -> _Home:
        if conversation not in self._home:
            now = asyncio.get_running_loop().time()
            server = min(self._servers, key=lambda server: (server.avoid_until > now, server.conversations))
            server.conversations += 1
            self._conversations[self._served] += 1
            self._home[conversation] = _Home(server, self._served, self.adapter)
        return self._home[conversation]

    def _tokens(self, server: _Server, choice: dict[str, Any], prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        """Ids and log-probabilities of the completion, after proving that the prompt was taken as it was sent."""
        ids, echo = choice.get("token_ids"), choice.get("prompt_token_ids")
        if not isinstance(ids, list) or not isinstance(echo, list):
            raise ModelFault(f"server {server.url} ignores return_token_ids; serve the policy with vLLM >= 0.22")
        if echo != prompt_ids:
            raise ModelFault(f"server {server.url} changed the prompt: {len(prompt_ids)} ids sent, {len(echo)} taken")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        if not ids or choice.get("finish_reason") not in ("stop", "length"):
            finish = choice.get("finish_reason")
            raise ModelFault(f"server {server.url}: {len(ids)} tokens with finish_reason {finish!r}; read its log")
        if len(logprobs) != len(ids) or None in logprobs:
            raise ModelFault(f"server {server.url}: {len(ids)} tokens but {len(logprobs)} log-probabilities")
        return ids, logprobs

    async def _check_logprobs(self, server: _Server, codec: TokenCodec) -> None:
        """The most likely token's log-probability must change with the temperature."""
        prompt = codec.start(None, "Hello")
        best = []
        for temperature in (1.0, 2.0):
            body = _completion_body(self.name, prompt, Sampling(max_tokens=1, temperature=temperature), codec)
            choice = _first_choice(server, await self._post(server, "/v1/completions", {**body, "logprobs": 1}))
            try:
                self._tokens(server, choice, prompt)
            except ModelFault as error:
                raise ConfigError(str(error)) from None
            best.append(max(choice["logprobs"]["top_logprobs"][0].values()))
        if abs(best[0] - best[1]) < 1e-4:
            raise ConfigError(
                f"server {server.url} gives raw log-probabilities; start it with --logprobs-mode processed_logprobs"
            )

    async def _check_adapters(self, server: _Server, adapters: int) -> None:
        """``--max-loras`` stands in a label of one of vLLM's Prometheus metrics, and nowhere else."""
        told = _MAX_LORAS.search((await self._request(server, "GET", "/metrics")).text)
        if told and int(told[1]) < adapters:
            raise ConfigError(
                f"server {server.url} holds {told[1]} adapters in a batch, but grpo.staleness {adapters - 1} needs "
                f"{adapters}; start vLLM with --max-loras {adapters} or set grpo.staleness=0"
            )

    async def _push(self, server: _Server, served: str, folder: Path) -> None:
        body = {"lora_name": served, "lora_path": str(folder)}
        # A 500 here is the server's verdict on the adapter (rank, shapes): trying again would not change it.
        response = await self._request(server, "POST", "/v1/load_lora_adapter", body, fatal=(500,))
        detail = self._detail(response)
        if response.is_success or "already been loaded" in detail:
            return
        if response.status_code in (404, 405) and "No adapter found" not in detail:
            raise ConfigError(
                f"server {server.url} loads no adapters at run time; start vLLM with --enable-lora and the environment "
                "variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            )
        if "No adapter found" in detail:
            raise ConfigError(
                f"server {server.url} does not see the adapter folder {folder}; put the run folder on a disk that the "
                "server mounts under the same path"
            )
        raise ConfigError(f"server {server.url} refuses the adapter {folder}: {detail}")

    def _unload_if_idle(self, served: str) -> None:
        if self._conversations[served] == 0:
            self._retired.discard(served)
            task = asyncio.get_running_loop().create_task(self._unload(served))
            self._unloads.add(task)
            task.add_done_callback(self._unloads.discard)

    async def _unload(self, served: str) -> None:
        del self._folders[served]
        for server in self._servers:
            with contextlib.suppress(httpx.TransportError):  # a server that is down holds no adapter
                await self._client.post(server.url + "/v1/unload_lora_adapter", json={"lora_name": served}, timeout=10)

    async def _served_by(self, server: _Server) -> dict[str, dict[str, Any]]:
        """What the server tells of each model and adapter, by name."""
        response = await self._request(server, "GET", "/v1/models")
        answer = _json(server, response)
        return {str(model.get("id")): model for model in answer.get("data") or []}

    @staticmethod
    def _absent(server: _Server, model: str, served: list[str]) -> str:
        names = ", ".join(map(repr, served)) or "nothing"
        return f"server {server.url} does not serve {model!r} (it serves {names}); set model.name to what it serves"

    async def _post(self, server: _Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
        model = body["model"]
        response = await self._request(server, "POST", path, body)
        if response.status_code == 404 and model not in (served := await self._served_by(server)):
            if model not in self._folders:
                raise ModelFault(self._absent(server, model, list(served)))
            try:
                await self._push(server, model, self._folders[model])
            except ConfigError as error:
                raise ModelFault(str(error)) from None
            response = await self._request(server, "POST", path, body)
        if response.is_success:
            return _json(server, response)
        detail = self._detail(response)
        raise ModelFault(f"server {server.url}: {path}: HTTP {response.status_code}: {detail}")

    async def _request(
        self, server: _Server, method: str, path: str, body: dict[str, Any] | None = None, fatal: tuple[int, ...] = ()
    ) -> httpx.Response:
        """The answer, after retries; ``fatal`` statuses are answers too. Raises ModelFault when ``retry_s`` is over."""
        clock = asyncio.get_running_loop().time
        deadline: float | None = None
        wait = _FIRST_WAIT_S
        while True:
            pause = wait * random.uniform(0.5, 1.0)
            try:
                response = await self._client.request(method, server.url + path, json=body)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__} {error}".strip()
                if self._revive is not None:
                    lost = clock()
                    await self._revive()
                    deadline = deadline and deadline + clock() - lost
            else:
                status = response.status_code
                if status in fatal or (status != 429 and status < 500):
                    return response
                problem = f"HTTP {status}: {self._detail(response)}"
                asked = response.headers.get("Retry-After", "")
                pause = max(pause, float(asked)) if asked.isdigit() else pause
            deadline = deadline or clock() + self._retry_s
            if clock() + pause > deadline:
                server.avoid_until = clock() + _AVOID_S
                raise ModelFault(f"server {server.url}: {path} failed for {self._retry_s:.0f} s, last with {problem}")
            await asyncio.sleep(pause)
            wait = min(2 * wait, _LONGEST_WAIT_S)

    def _detail(self, response: httpx.Response) -> str:
        """The server's message on one line, without the key that some servers repeat."""
        try:
            data = response.json()
            error = data.get("error", data)
            text = str(error.get("message", error) if isinstance(error, dict) else error)
        except (ValueError, AttributeError):
            text = response.text
        if self._key:
            text = text.replace(self._key, "***")
        return " ".join(text.split())[:500]


def _is_http(url: str) -> bool:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host)


def _completion_body(served: str, prompt_ids: list[int], sampling: Sampling, codec: TokenCodec) -> dict[str, Any]:
    """A request whose answer depends on no default of the server or of the model's files."""
    return {
        "model": served,
        "prompt": prompt_ids,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": sampling.seed,
        # Only the template's end-of-turn token ends a turn, whatever else the model's files call an end.
        "stop_token_ids": [codec.eot_id],
        "ignore_eos": True,
        "logprobs": 0,  # of the sampled tokens alone
        "return_token_ids": True,
    }


def _first_choice(server: _Server, answer: dict[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ModelFault(f"server {server.url}: the answer holds no choices; is it an OpenAI-compatible server?")
    return choices[0]


def _json(server: _Server, response: httpx.Response) -> dict[str, Any]:
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ModelFault(f"server {server.url}: HTTP {response.status_code} without a JSON object; is the url right?")
    return answer
