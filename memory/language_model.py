"""Client of a chat model behind any OpenAI-compatible server: cached, counted, limited, its answers validated.

- **Cache.** An answer is stored on disk under the hash of what was asked (messages, schema, model, sampling), so that a
  build that is run again pays for nothing it has paid for. A cached answer that turns out unusable leads to the same
  follow-up question, whose answer is cached too.
- **Key.** It is read from the environment variable that the settings name, goes into the request's header, and nowhere
  else: it is cut out of whatever a server says before that is stored or shown.
- **Limits.** Before a request is sent, the most it can cost is set aside; one that does not fit raises
  :class:`BudgetSpent` and nothing is sent.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from memory.answers import bounded
from memory.builder_settings import LanguageModelSettings
from memory.formats import clean
from memory.records import MemoryRecordError

Message = dict[str, str]
T = TypeVar("T", bound=BaseModel)

_FIRST_WAIT_S = 0.5
_CHARACTERS_PER_TOKEN = 2
"""Fewer than in ordinary text (about 4), so that what is set aside for a prompt is not too little."""


class LanguageModelFault(RuntimeError):
    """A request failed for good: the server is down, refuses it, or gives no answer that can be used."""


class UnusableAnswer(LanguageModelFault):
    """The model answered, and no answer could be used."""


class RequestRefused(LanguageModelFault):
    """The server refuses this request (400, 413, 422), too long a one for example; others may pass."""


class BudgetSpent(LanguageModelFault):
    """The limit of calls or money leaves no room for the request."""


@dataclass(frozen=True)
class Answer:
    """``tokens_in`` and ``tokens_out`` as the server counts them (estimated where it does not)."""

    text: str
    finish: str = "stop"
    tokens_in: int = 0
    tokens_out: int = 0
    cached: bool = False


@dataclass
class Spend:
    """What was asked and what it took. Money in the currency of the settings' prices."""

    calls: int = 0
    """Requests answered by the server, each paid once."""
    cached: int = 0
    """Requests answered by the cache."""
    tokens_in: int = 0
    tokens_out: int = 0
    cost: float = 0.0
    retried: Counter[str] = field(default_factory=Counter)
    """Tries that failed and were followed by another or given up, by kind: "HTTP 429", "ReadTimeout", …"""
    unusable: Counter[str] = field(default_factory=Counter)
    """Answers that could not be used, by kind: "cut off", "not JSON", "not as the schema says", or the caller's."""
    estimated: int = 0
    """Answers whose tokens the server did not count."""
    form: str = ""
    """How the last paid answer was constrained: the form asked for, or a weaker one that the server did not refuse."""
    answers: dict[str, Counter[str]] = field(default_factory=dict)
    """Answers by schema, cached ones included: all ("answers"), and how many of them were "complete" (not cut off),
    "valid" (JSON that fits the schema) and "grounded" (nothing wrong was found in what they claim)."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "cached": self.cached,
            "tokens_in": self.tokens_in,
            "tokens_out": self.tokens_out,
            "cost": round(self.cost, 6),
            "retried": dict(self.retried),
            "unusable": dict(self.unusable),
            "estimated": self.estimated,
            "form": self.form,
            "answers": {name: dict(counts) for name, counts in self.answers.items()},
        }


class LanguageModel:
    """The model that ``settings`` name. Safe to call from several threads.

    Args:
        cache: folder of the answers.
        sleep: waits so many seconds.

    Raises:
        MemoryRecordError: an address that is none, a key that cannot be one.
    """

    def __init__(
        self, settings: LanguageModelSettings, cache: Path, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        if not settings.url.startswith(("http://", "https://")):
            raise MemoryRecordError(f"model.url: {settings.url!r} is no address; write https://host")
        self.settings = settings
        self.name = settings.model
        self.spend = Spend()
        self._cache = cache
        self._sleep = sleep
        self._lock = threading.Lock()
        self._set_aside = 0.0
        self._in_flight = 0
        self._forms = _FORMS[_FORMS.index(settings.structured) :]
        self._key = os.environ.get(settings.key, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            # The HTTP library would put the key into its message.
            raise MemoryRecordError(
                f"environment variable {settings.key}: holds characters that no key has; set it again"
            )
        self._url = settings.url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(settings.timeout_s, connect=min(10.0, settings.timeout_s)),
        )

    def close(self) -> None:
        self._client.close()

    def ask(self, messages: Sequence[Message], schema: type[BaseModel]) -> Answer:
        """The model's answer to ``messages``, from the cache where it lies there; the text is not yet validated.

        Raises:
            BudgetSpent: see the module. LanguageModelFault: the request failed for good.
        """
        request = self._request(messages, schema)
        file = self._file(request)
        stored = _read(file)
        if stored is not None:
            with self._lock:
                self.spend.cached += 1
            return stored
        worst = self._reserve(messages)
        try:
            answer = self._paid(request)
        finally:
            with self._lock:
                self._set_aside -= worst
                self._in_flight -= 1
        _write(file, {"request": request, "answer": answer.__dict__ | {"cached": False}})
        return answer

    def structured(
        self,
        messages: Sequence[Message],
        schema: type[T],
        check: Callable[[T], Sequence[str]] = lambda _: (),
        reasks: int | None = None,
    ) -> T:
        """The answer as a ``schema``, asked for again (``reasks`` times) with what was wrong with it.

        Args:
            check: what is wrong with a valid answer, in sentences for the model; empty: nothing. The last answer is
                returned even so: the caller sorts out what is wrong with it.
            reasks: None: as many as the settings say.

        Raises:
            UnusableAnswer: no answer was valid. BudgetSpent, LanguageModelFault: as :meth:`ask`.
        """
        reasks = self.settings.reasks if reasks is None else reasks
        talk = [dict(message) for message in messages]
        problem = ""
        best: T | None = None
        asked = []
        for _ in range(reasks + 1):
            asked.append(self._file(self._request(talk, schema)))
            answer = self.ask(talk, schema)
            value, fault, problem = read_answer(answer, schema)
            wrong = [] if value is None else list(check(value))
            with self._lock:
                counts = self.spend.answers.setdefault(schema.__name__, Counter())
                counts["answers"] += 1
                counts["complete"] += answer.finish != "length"
                counts["valid"] += value is not None
                counts["grounded"] += value is not None and not wrong
            if value is not None:
                best = value
                if not wrong:
                    return value
                fault, problem = "wrong evidence or operation", " ".join(wrong)
            with self._lock:
                self.spend.unusable[fault] += 1
            talk += [
                {"role": "assistant", "content": answer.text[:_REPEATED_CHARACTERS]},
                {"role": "user", "content": f"{problem} Answer again, the whole JSON object."},
            ]
        if best is None:
            if self.settings.temperature != 0:  # another sample may be better: the next build asks anew
                for file in asked:
                    file.unlink(missing_ok=True)
            raise UnusableAnswer(f"model {self.name!r}: no usable answer in {reasks + 1}: {problem}")
        return best

    def _file(self, request: dict[str, Any]) -> Path:
        """Where the answer to ``request`` is kept."""
        return self._cache / f"{request_hash(request)}.json"

    def _request(self, messages: Sequence[Message], schema: type[BaseModel]) -> dict[str, Any]:
        """What is asked, without how: neither the address nor the form of the constraint changes the answer meant."""
        return {
            "model": self.name,
            "messages": list(messages),
            "schema": bounded(schema, self.settings.answers),
            "max_tokens": self.settings.max_tokens,
            "temperature": self.settings.temperature,
        }

    def _reserve(self, messages: Sequence[Message]) -> float:
        settings = self.settings
        tokens = sum(len(message["content"]) for message in messages) / _CHARACTERS_PER_TOKEN
        worst = (tokens * settings.price_in + settings.max_tokens * settings.price_out) / 1e6
        with self._lock:
            if settings.max_calls is not None and self.spend.calls + self._in_flight >= settings.max_calls:
                raise BudgetSpent(f"model.max_calls: {settings.max_calls} are used up; raise it to go on")
            if settings.max_cost is not None and self.spend.cost + self._set_aside + worst > settings.max_cost:
                raise BudgetSpent(
                    f"model.max_cost: {self.spend.cost:.4f} of {settings.max_cost} are spent and the next call "
                    f"may cost {worst:.4f}; raise it to go on"
                )
            self._set_aside += worst
            self._in_flight += 1
        return worst

    def _paid(self, request: dict[str, Any]) -> Answer:
        """Send ``request`` until it is answered. Raises LanguageModelFault."""
        forms = self._forms
        wait = _FIRST_WAIT_S
        problem = ""
        tries = 0
        while tries < self.settings.tries:
            body = self._body(request, forms[0])
            pause = wait * random.uniform(0.5, 1.0)
            try:
                response = self._client.post(self._url, json=body)
            except httpx.HTTPError as error:
                kind = problem = type(error).__name__  # its text may quote headers
            else:
                status = response.status_code
                if status == 200:
                    answer = self._answer(response, request)
                    if answer is not None:
                        self._forms = forms  # what the server refused once it is not asked again
                        self.spend.form = forms[0]
                        return answer
                    kind, problem = "no answer in HTTP 200", f"HTTP 200 without a message: {self._detail(response)}"
                elif status in (400, 422) and len(forms) > 1:
                    forms = forms[1:]
                    with self._lock:
                        self.spend.retried[f"HTTP {status} to a response format"] += 1
                    continue
                elif status in (408, 409, 429) or status >= 500:
                    kind, problem = f"HTTP {status}", f"HTTP {status}: {self._detail(response)}"
                    pause = max(pause, _retry_after(response.headers.get("Retry-After", "")))
                else:
                    hint = f"; is {self.settings.key} set?" if status in (401, 403) else ""
                    kind_of_fault = RequestRefused if status in (400, 413, 422) else LanguageModelFault
                    raise kind_of_fault(f"server {self._url}: HTTP {status}: {self._detail(response)}{hint}")
            tries += 1
            with self._lock:
                self.spend.retried[kind] += 1
            if tries < self.settings.tries:
                self._sleep(min(pause, self.settings.longest_wait_s))
                wait *= 2
        raise LanguageModelFault(f"server {self._url}: failed {tries} times, last with {problem}")

    def _body(self, request: dict[str, Any], form: str) -> dict[str, Any]:
        body: dict[str, Any] = {"model": request["model"], "messages": request["messages"]}
        body[self.settings.max_tokens_field] = request["max_tokens"]
        if request["temperature"] is not None:
            body["temperature"] = request["temperature"]
        if form.startswith("json_schema"):
            schema = request["schema"] if form == "json_schema" else without_lengths(request["schema"])
            name = re.sub(r"\W", "_", str(schema.get("title", "answer")))
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": name, "schema": schema, "strict": True},
            }
        elif form == "json_object":
            body["response_format"] = {"type": "json_object"}
        return body

    def _answer(self, response: httpx.Response, request: dict[str, Any]) -> Answer | None:
        """The answer, counted; None: the response holds none."""
        try:
            data = response.json()
            choice = data["choices"][0]
            text = choice["message"]["content"]
            usage = data.get("usage")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            return None
        if text is None and choice.get("finish_reason"):
            text = ""  # all its tokens went into thinking, or it refuses: an answer of no use, and paid
        if not isinstance(text, str):
            return None
        text = self._without_key(text).encode("utf-8", "replace").decode()
        tokens = [
            usage.get(name) if isinstance(usage, dict) else None for name in ("prompt_tokens", "completion_tokens")
        ]
        counted = all(isinstance(count, int) and count >= 0 for count in tokens)
        if not counted:
            prompt = sum(len(message["content"]) for message in request["messages"])
            tokens = [prompt // 4, len(text) // 4]
        tokens_in, tokens_out = int(tokens[0] or 0), int(tokens[1] or 0)
        with self._lock:
            self.spend.calls += 1
            self.spend.tokens_in += tokens_in
            self.spend.tokens_out += tokens_out
            self.spend.cost += (tokens_in * self.settings.price_in + tokens_out * self.settings.price_out) / 1e6
            self.spend.estimated += not counted
        return Answer(text, str(choice.get("finish_reason") or "stop"), tokens_in, tokens_out)

    def _detail(self, response: httpx.Response) -> str:
        """The server's message on one line, without the key that some servers repeat."""
        try:
            data = response.json()
            error = data.get("error", data)
            text = str(error.get("message", error) if isinstance(error, dict) else error)
        except (ValueError, AttributeError, RecursionError):
            text = response.text
        return " ".join(self._without_key(text).split())[:300]

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


_FORMS = ("json_schema", "json_schema without lengths", "json_object", "text")
"""Forms of ``response_format``, the strongest first."""

BROKEN = _CUT_OFF, _NOT_JSON, _NOT_AS_THE_SCHEMA_SAYS = ("cut off", "not JSON", "not as the schema says")
"""Kinds of unusable answers that a server which enforces the whole schema cannot give."""

_REPEATED_CHARACTERS = 8000
"""How much of an unusable answer the model is shown again."""

_LENGTHS = {"maxLength", "minLength", "maxItems", "minItems", "minimum", "maximum", "exclusiveMinimum"}


def without_lengths(schema: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema without bounds of lengths and numbers, which some servers do not take."""
    copied = copy.deepcopy(schema)

    def strip(node: Any) -> None:
        if isinstance(node, dict):
            for key in _LENGTHS & node.keys():
                if not isinstance(node[key], dict):  # a property may bear such a name
                    del node[key]
            for value in node.values():
                strip(value)
        elif isinstance(node, list):
            for value in node:
                strip(value)

    strip(copied)
    return copied


def read_answer(answer: Answer, schema: type[T]) -> tuple[T | None, str, str]:
    """(value, "", ""), or (None, kind, what is wrong as a sentence for the model)."""
    if answer.finish == "length":
        return None, _CUT_OFF, f"Your answer was cut off after {answer.tokens_out} tokens: be briefer."
    text = answer.text.strip()
    fenced = re.fullmatch(r"```\w*\n(.*?)\n?```", text, re.DOTALL)
    if fenced:
        text = fenced[1]
    elif not text.startswith("{"):
        text = text[text.find("{") : text.rfind("}") + 1]
    try:
        data = json.loads(text, strict=False)  # some grammars let control characters stand in a text
    except (ValueError, RecursionError) as error:  # ValueError also: a number of thousands of digits
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply, or too long a number"
        return None, _NOT_JSON, f"Your answer is no JSON object ({reason})."
    try:
        return schema.model_validate(clean(data)), "", ""
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()[:5])
        return None, _NOT_AS_THE_SCHEMA_SAYS, f"Your answer does not fit the schema ({wrong})."


def request_hash(request: dict[str, Any]) -> str:
    """Hex SHA-256 of the request's canonical JSON: the name of its answer in the cache."""
    return hashlib.sha256(json.dumps(request, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _retry_after(value: str) -> float:
    """Seconds that a Retry-After header (a number or a date) asks for; 0 where it says nothing."""
    if re.fullmatch(r"\s*[0-9]{1,9}\s*", value):
        return float(value)
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    return max(0.0, (when.astimezone(UTC) - datetime.now(UTC)).total_seconds())


def _read(file: Path) -> Answer | None:
    """The stored answer; None where there is none, or half of one."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return Answer(**{**data["answer"], "cached": True})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, value: dict[str, Any]) -> None:
    """Write so that a kill, or another process, leaves a whole file or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, suffix=".tmp", delete=False) as scratch:
        json.dump(value, scratch, ensure_ascii=False)
    os.replace(scratch.name, file)
