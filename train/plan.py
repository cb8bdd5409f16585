"""``saga train --dry-run``: what a run would play, ask, train and store, phase by phase, before anything is started.

Figures are upper bounds at step caps: every episode goes on to its last step and every reply to its last token, no
group is without signal, and no action is sampled again. Seconds come from the stated rates. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from envs.cache import cache_folder
from train.config import Config, GrpoConfig, LoraConfig
from train.schedule import (
    REJECTION,
    WARM_START,
    WITHOUT,
    collect_phase,
    collects,
    distil_phase,
    has_knowledge,
    has_rounds,
    iteration_phase,
    round_evaluation,
    round_iterations,
    sources,
    trains,
    validate_phase,
)
from train.tables import compact_table

OPENING_TOKENS = 200
"""Instructions, task and first observation."""
STEP_TOKENS = 40
"""An observation and the marks of two turns."""
STEP_BYTES = 250
"""A step of an episode on disk."""
TRAJECTORY_BYTES = 12_000
"""A trajectory in the memory, with its episode and values."""


@dataclass(frozen=True)
class Rates:
    """Tokens a second. The defaults are SmolLM2-135M in bfloat16 on two CPU cores (``scripts/quickstart.sh``)."""

    generated: float = 80.0
    trained: float = 380.0


@dataclass(frozen=True)
class Planned:
    """One phase. ``calls``: of the policy's model; ``builder_calls``: of the builder's."""

    phase: str
    episodes: int = 0
    calls: int = 0
    generated: int = 0
    trained: int = 0
    builder_calls: int = 0
    bytes: int = 0

    def seconds(self, rates: Rates) -> float:
        return self.generated / rates.generated + self.trained / rates.trained


def plan_run(config: Config, sizes: Mapping[str, int], adapter_bytes: int = 0) -> list[Planned]:
    """The phases of a run in order.

    Args:
        sizes: number of tasks of each task set that ``config`` names.
        adapter_bytes: of one saved version.
    """
    return list(_phases(config, sizes, adapter_bytes))


def _phases(config: Config, sizes: Mapping[str, int], adapter_bytes: int) -> Iterator[Planned]:
    games = sizes[config.eval.tasks] * config.eval.seeds
    begun = config.memory is not None and config.memory.mode != "none" and config.memory.store is not None
    tuned = config.env.max_steps  # steps of a training episode

    def evaluation(phase: str, guided: bool) -> Iterator[Planned]:
        if guided:
            yield _played(config, phase + WITHOUT, games, config.env.max_steps, guided=False)
        yield _played(config, phase, games, config.env.max_steps, guided=guided)

    if config.eval.at_start:
        yield from evaluation("eval-start", begun)
    if config.warm_start:
        count = min(config.warm_start.episodes, sizes[config.warm_start.tasks])
        trained = math.ceil(config.warm_start.epochs * count * _row_tokens(config, tuned))
        yield Planned(WARM_START, count, trained=trained, bytes=count * tuned * STEP_BYTES + adapter_bytes)
        yield from evaluation("eval-warm", begun)
    if config.rejection:
        tasks = min(config.rejection.episodes, sizes[config.rejection.tasks])
        kept = tasks * min(config.rejection.keep, config.rejection.samples)
        trained = math.ceil(config.rejection.epochs * kept * _row_tokens(config, tuned))
        played = _played(config, REJECTION, tasks * config.rejection.samples, tuned, guided=begun)
        yield _with(played, trained=trained, more_bytes=adapter_bytes)
        yield from evaluation("eval-rejection", begun)
    guided = begun
    for round in range(1, config.rounds + 1) if has_rounds(config) else ():
        if config.collect and collects(config, round):
            count = config.collect.episodes * config.collect.samples
            yield _played(config, collect_phase(round), count, tuned, guided=guided)
        if has_knowledge(config) and sources(config, round):
            yield from _knowledge(config, round)
            guided = True
        if config.grpo:
            grpo = config.grpo
            count = grpo.iterations * (grpo.groups + grpo.refill) * grpo.group_size
            updated = grpo.iterations * grpo.groups * grpo.group_size * grpo.passes
            played = _played(config, _span(grpo, round), count, tuned, guided=guided)
            kept_adapters = min(grpo.iterations, config.run.keep_adapters)
            yield _with(
                played, trained=updated * _row_tokens(config, tuned), more_bytes=(kept_adapters + 2) * adapter_bytes
            )
        yield from evaluation(round_evaluation(config, round), guided)


def _knowledge(config: Config, round: int) -> Iterator[Planned]:
    """What a round makes of its rollouts: writes of the memory, a builder's calls, and a validation's episodes."""
    memory = config.memory
    new = _new_trajectories(config, round)
    asked = 0
    if memory is not None and memory.builder.builder == "model":
        read = min(new, memory.builder.max_trajectories or new)
        asked = read + 3 * math.ceil(read / memory.builder.episodes_per_call)
    yield Planned(distil_phase(round), builder_calls=asked, bytes=2 * new * TRAJECTORY_BYTES)
    if memory is not None and memory.mode in ("direct", "full") and memory.validation.episodes:
        yield _played(config, validate_phase(round), memory.validation.episodes, config.env.max_steps, guided=True)


def _new_trajectories(config: Config, round: int) -> int:
    count = 0
    for phase in sources(config, round):
        if phase == REJECTION and config.rejection:
            count += config.rejection.episodes * config.rejection.samples
        elif phase == collect_phase(round) and config.collect:
            count += config.collect.episodes * config.collect.samples
        elif config.grpo:
            count += (config.grpo.groups + config.grpo.refill) * config.grpo.group_size
    return count


def _played(config: Config, phase: str, episodes: int, steps: int, *, guided: bool) -> Planned:
    """Episodes of the policy, with a plan and instantiations of its own where the memory's settings ask for them."""
    calls, tokens = steps, steps * config.agent.max_new_tokens
    memory = config.memory
    if guided and memory is not None:
        if memory.plans:
            calls, tokens = calls + 1, tokens + memory.plan_tokens
        if memory.instantiation == "policy" and memory.mode in ("full", "shuffled"):
            asked = memory.retrieval.principles
            calls, tokens = calls + asked, tokens + asked * memory.instantiation_tokens
    return Planned(phase, episodes, episodes * calls, episodes * tokens, bytes=episodes * steps * STEP_BYTES)


def _with(planned: Planned, *, trained: int, more_bytes: int) -> Planned:
    return Planned(
        planned.phase, planned.episodes, planned.calls, planned.generated, trained, bytes=planned.bytes + more_bytes
    )


def _span(grpo: GrpoConfig, round: int) -> str:
    names = [iteration_phase(number) for number in round_iterations(grpo, round)]
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1][-4:]}"


def _row_tokens(config: Config, steps: int) -> int:
    """Tokens of an episode as a training row; at most the context."""
    return min(config.agent.context_tokens, OPENING_TOKENS + steps * (STEP_TOKENS + config.agent.max_new_tokens))


def adapter_bytes(model: str, lora: LoraConfig) -> int | None:
    """Size of a saved adapter: 4 bytes for each of the r (d_in + d_out) weights of a linear module (LoRA, arXiv
    2106.09685); None: the model's ``config.json`` is not on this machine, or other modules are adapted."""
    for folder in (Path(model).expanduser(), cache_folder() / "models" / model):
        if (folder / "config.json").is_file():
            break
    else:
        return None
    shape = json.loads((folder / "config.json").read_text())
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    if lora.target_modules != "all-linear" or not all(name in shape for name in needed):
        return None
    hidden, inner, layers, heads, kv_heads = (int(shape[name]) for name in needed)
    head = int(shape.get("head_dim") or hidden // heads)
    query, kv = heads * head, kv_heads * head
    ends = 2 * (hidden + query) + 2 * (hidden + kv) + 3 * (hidden + inner)
    return 4 * lora.rank * ends * min(layers, lora.last_layers or layers)


def plan_table(config: Config, planned: list[Planned], rates: Rates) -> Table:
    """The phases and their sum."""
    columns = ("phase", "episodes", "calls", "new", "trained", "builder", "min.", "MB")
    table = compact_table(f"{config.run.name}: at most", columns, left=("phase",))
    total = Planned(
        "all",
        *(
            sum(getattr(one, name) for one in planned)
            for name in ("episodes", "calls", "generated", "trained", "builder_calls", "bytes")
        ),
    )
    for row in [*planned, total]:
        table.add_row(
            row.phase,
            str(row.episodes),
            str(row.calls),
            str(row.generated),
            str(row.trained),
            str(row.builder_calls),
            f"{row.seconds(rates) / 60:.1f}",
            f"{row.bytes / 1e6:.1f}",
        )
    return table


def plan_lines(config: Config, rates: Rates, adapter: int | None) -> list[str]:
    """What the table's numbers rest on."""
    sections = ("warm_start", "rejection", "collect", "memory", "samem", "grpo")
    parts = [name for name in sections if getattr(config, name)]
    lines = [
        f"{config.rounds} round{'s' if config.rounds > 1 else ''}; parts: {', '.join(parts) or 'evaluation alone'}",
        "calls and new tokens of the policy, tokens trained, calls of the builder; minutes at "
        f"{rates.generated:g} new and {rates.trained:g} trained tokens a second (--rates GENERATED TRAINED); resamples "
        "and the builder's answers come on top",
    ]
    if trains(config) and adapter is None:
        lines.append(f"adapters are not counted: the shape of model.name {config.model.name!r} is not known here")
    return lines


def show_plan(config: Config, sizes: Mapping[str, int], rates: tuple[float, float] | None) -> None:
    """Print the plan of a run (see :func:`plan_run`)."""
    chosen = Rates(*rates) if rates else Rates()
    size = adapter_bytes(config.model.name, config.lora)
    console = Console(highlight=False)
    console.print(plan_table(config, plan_run(config, sizes, size or 0), chosen))
    for line in plan_lines(config, chosen, size):
        console.print(line, soft_wrap=True, markup=False)
