"""Settings of the section ``memory`` of a configuration: how it is used, audited, validated. Imports nothing heavy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from memory.records import Status

Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0)]

Mode = Literal["none", "trajectory", "direct", "full", "shuffled"]


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True)


class EmbedderSettings(Settings):
    """Who turns texts into vectors."""

    kind: Literal["minilm", "hashing", "server"] = "minilm"
    """``minilm``: all-MiniLM-L6-v2 in process (384-d). ``hashing``: words and letter triples, no model (for tests).
    ``server``: an OpenAI-compatible ``/v1/embeddings`` at ``url``; its key is the environment variable
    OPENAI_API_KEY."""
    url: str = ""
    model: str = ""
    """Name of the model at ``url``."""
    batch: Annotated[int, Field(ge=1)] = 32

    @model_validator(mode="after")
    def _server_is_named(self) -> EmbedderSettings:
        if self.kind == "server" and not (self.url and self.model):
            raise ValueError(
                f"kind 'server' needs url and model, not {self.url!r} and {self.model!r}; give both or set kind: minilm"
            )
        return self


class RetrievalSettings(Settings):
    """How many items of each level are retrieved, and what their score weighs."""

    trajectories: Count = 2
    """Raw trajectories; in mode ``trajectory`` only."""
    episodes: Count = 1
    procedures: Count = 2
    principles: Count = 5
    similarity: Weight = 1.0
    """Weight of the cosine between query and item."""
    task_type: Weight = 0.3
    """Added for an item of the task's own type; half of it for one of any type."""
    utility: Weight = 0.3
    """Weight of the ledger's utility, which lies in [-1, 1]."""


class MemorySettings(Settings):
    """How an agent uses the memory."""

    store: str | None = None
    """``sqlite:///path/memory.db`` or a PostgreSQL URL; None: ``memory.db`` in the run's folder.
    A run that learns goes on with a copy of it there, and never writes to it."""
    mode: Mode = "full"
    """``full``: plan, retrieve, instantiate, regulate. ``direct``: principles as they are, not instantiated.
    ``trajectory``: raw trajectories alone. ``shuffled``: the control of ``full``, with words shuffled and checks fired
    at random moments: length and frequency are the same, the content is gone. ``none``: no memory."""
    retrieval: RetrievalSettings = RetrievalSettings()
    budget_tokens: Count = 400
    """Most tokens of memory in the prompt; what does not fit is left out, and recorded as such."""
    prompt_statuses: list[Status] = ["candidate", "audited", "validated"]
    """Which status may enter a prompt. Candidates and audited ones are marked as hypotheses."""
    block_statuses: list[Status] = ["audited", "validated"]
    """Whose predicates may have an action taken back, if they passed their newest audit (candidates: unaudited)."""
    attempts: Count = 3
    """Most resamples of an action that violates a predicate; then the original is played. 0: no regulation."""
    instantiation: Literal["policy", "builder", "offline"] = "offline"
    """Who turns principles into constraints for the situation: a model, or the rules of :mod:`memory.instantiate`."""
    plan_tokens: Count = 48
    """Length of the plan that the policy writes first (``direct``, ``full``, ``shuffled``); 0: none, the task and the
    first observation are the query."""
    instantiation_tokens: Annotated[int, Field(ge=1)] = 48
    """Length of a model's answer for one principle."""
    embedder: EmbedderSettings = EmbedderSettings()

    @property
    def plans(self) -> bool:
        return self.plan_tokens > 0 and self.mode in ("direct", "full", "shuffled")

    @model_validator(mode="after")
    def _removed_items_stay_out(self) -> MemorySettings:
        for name, statuses in (("prompt_statuses", self.prompt_statuses), ("block_statuses", self.block_statuses)):
            if "retired" in statuses:
                raise ValueError(f"{name} {statuses}: a retired item is out of use; drop 'retired'")
        unseen = [status for status in self.block_statuses if status not in self.prompt_statuses]
        if unseen:
            raise ValueError(
                f"block_statuses {self.block_statuses}: {unseen} may not enter a prompt, so it can block nothing; add "
                "it to prompt_statuses or drop it"
            )
        return self


class AuditSettings(Settings):
    """When a predicate may block actions."""

    max_false_positives: Share = 0.02
    """Largest share of good moves that it may stop."""
    min_trigger_rate: Share = 0.005
    max_trigger_rate: Share = 0.5
    """Band of the share of steps at which it fires."""
    max_dead_ends: Share = 0.5
    """Largest share of firings at which it lets no known action pass."""
    max_switched_off: Share = 0.05
    """Largest share of episodes in which it raises or takes too long."""
    min_episodes: AtLeastOne = 5
    """Episodes that must violate it, and episodes that must follow it."""
    window: Annotated[int, Field(ge=0)] = 5
    """Steps after a violation within which others must follow it to be compared with."""
    min_good_moves: AtLeastOne = 20
    """Good moves that must have been seen."""
    samples: AtLeastOne = 1000
    """Resamples of the bootstrap."""
    alternatives: AtLeastOne = 20
    """Actions tried in place of one that it stops."""
    firings: AtLeastOne = 100
    """Firings at which alternatives are tried."""
    trajectories: AtLeastOne = 1000
    """Newest trajectories of a world and grammar on which a store's predicates are audited."""
    refrained: AtLeastOne = 1500
    """Steps at which a prohibition is tried on the actions that it stopped elsewhere."""
    seed: int = 0


class ValidationSettings(Settings):
    """The experiment of a round."""

    tasks: Annotated[int, Field(ge=16)] = 16
    """Tasks on which a principle is tried."""
    samples: Annotated[int, Field(ge=2)] = 2
    """Episodes per task and arm."""
    temperature: Annotated[float, Field(gt=0)] = 0.7
    """Of the policy's replies; above 0, or the samples of a task would be the same."""
    episodes: Annotated[int, Field(ge=0)] = 256
    """Most episodes that the experiment may cost, those without a principle included. 0: none."""
    level: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Family-wise error over the principles tried at once (Holm)."""
    tries: AtLeastOne = 3
    """Experiments after which an undecided principle is rejected."""
    revalidate_after: AtLeastOne = 5
    """Rounds after which a validated principle is tried again."""
    ledger_episodes: AtLeastOne = 20
    """Episodes with a principle, and without it, before its ledger can retire it."""
    resamples: AtLeastOne = 50_000
    """Of the bootstrap over tasks."""
    seed: int = 0
