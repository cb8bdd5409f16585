"""Settings of who builds the memory, and how large it may become. Imports nothing heavy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from memory.answers import ANSWERS, AnswerLimits, bounded, longest
from memory.settings import Settings

Positive = Annotated[int, Field(ge=1)]
Price = Annotated[float, Field(ge=0)]

VLLM_STRUCTURED_OUTPUTS = '{"backend": "guidance", "disable_any_whitespace": true}'
"""Value of vLLM's flag ``--structured-outputs-config`` with which it enforces every bound of a schema. Its default
backend lets white space run on, and allows neither quotation marks nor backslashes in a text of bounded length."""


class LanguageModelSettings(Settings):
    """A chat model behind an OpenAI-compatible server."""

    url: str
    """Base address, with or without a trailing ``/v1``: https://api.openai.com, http://127.0.0.1:8000."""
    model: str
    """Name under which the server knows the model."""
    key: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = "OPENAI_API_KEY"
    """NAME of the environment variable that holds the key (never the key itself); unset: none is sent."""
    structured: Literal["json_schema", "json_object", "text"] = "json_schema"
    """How answers are constrained. A server that refuses a form is asked for the next weaker one; every answer is
    validated, whatever the form. How much of a schema is enforced is the server's affair: vLLM enforces all of it when
    started with ``--structured-outputs-config '{"backend": "guidance", "disable_any_whitespace": true}'``."""
    answers: AnswerLimits = AnswerLimits()
    max_tokens: Positive = 16384
    """Most tokens of an answer; with ``json_schema`` at least as many as the longest answer within ``answers`` takes,
    so that none is cut off. A server with a small context needs smaller ``answers`` and fewer tokens."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the server calls that (OpenAI's reasoning models: max_completion_tokens)."""
    temperature: Annotated[float, Field(ge=0)] | None = 0.0
    """None: not sent, for servers that refuse it."""
    concurrency: Positive = 4
    """Requests in flight."""
    timeout_s: Annotated[float, Field(gt=0)] = 180.0
    """Seconds that one try may take."""
    tries: Positive = 6
    """Tries of one request that meets overload (429), server errors (5xx), time-outs or answers that are no JSON."""
    longest_wait_s: Annotated[float, Field(ge=0)] = 60.0
    """Longest wait between two tries, whatever a Retry-After says."""
    reasks: Annotated[int, Field(ge=0)] = 2
    """How often an answer that cannot be used is asked for again, with what was wrong with it."""
    price_in: Price = 0.0
    """Money per million prompt tokens, in any currency."""
    price_out: Price = 0.0
    """Money per million answer tokens."""
    max_calls: Positive | None = None
    """Most requests that one build may pay for (cached answers are free); None: no limit."""
    max_cost: Price | None = None
    """Most money that one build may spend, with ``price_in`` and ``price_out``; None: no limit."""

    @model_validator(mode="after")
    def _answers_fit(self) -> LanguageModelSettings:
        tokens, stage = max((longest(bounded(answer, self.answers)), stage) for stage, answer in ANSWERS.items())
        if self.structured == "json_schema" and self.max_tokens < tokens:
            limits = ", ".join(f"answers.{name} ({value})" for name, value in self.answers)
            raise ValueError(
                f"max_tokens {self.max_tokens} is less than the {tokens} tokens of the longest answer (stage {stage}), "
                f"which would be cut off; set max_tokens to {tokens} or more, or lower {limits}"
            )
        return self


class LevelLimits(Settings):
    """Most items of a level in use (neither retired nor rejected) for one world and action grammar."""

    episodes: Positive = 2000
    procedures: Positive = 200
    principles: Positive = 100


class ConsolidationSettings(Settings):
    """Deduplication and size of the memory."""

    similarity: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Items of one kind whose texts' cosine is at least this are one. With the embedder minilm, rewordings of one rule
    lie between 0.66 and 0.96, rules that differ in one action up to 0.92: lower values would join those."""
    limits: LevelLimits = LevelLimits()


class BuilderSettings(Settings):
    """Who turns trajectories into episodes, procedures and principles, and from how much."""

    builder: Literal["offline", "model"] = "offline"
    """``offline``: by counting and aligning, without a model. ``model``: by the language model at ``model``."""
    model: LanguageModelSettings | None = None
    max_trajectories: Positive | None = None
    """Most new trajectories that one build of a language model reads; the others wait for the next. None: all."""
    episodes_per_call: Positive = 12
    """Episodes that one prompt of the stages ``procedures`` and ``principles`` shows."""
    items_per_prompt: Positive = 30
    """Existing procedures or principles of a task type that a prompt shows, those of highest utility first."""
    step_characters: Positive = 500
    """A longer observation, thought or answer is cut in the middle when it is shown."""
    trajectory_characters: Positive = 24000
    """Characters of a trajectory that a prompt shows; steps in the middle of a longer one are left out."""
    predicates: bool = True
    """Ask which principles are harmful to violate, and for predicates of those."""
    repairs: Annotated[int, Field(ge=0)] = 2
    """How often a predicate that does not compile is asked for again, with the error."""
    consolidation: ConsolidationSettings = ConsolidationSettings()

    @model_validator(mode="after")
    def _model_is_named(self) -> BuilderSettings:
        if self.builder == "model" and self.model is None:
            raise ValueError("builder 'model' needs model.url and model.model; give both or set builder: offline")
        return self
