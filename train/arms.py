"""The arms of ``saga ablate``: each is a named set of overrides upon one configuration. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from train.config import Config, ConfigError, config_from

BASELINE = "none"
"""The arm that the others are compared with."""

Built = Literal["", "offline", "strong", "policy"]


@dataclass(frozen=True)
class Arm:
    """What an arm changes. ``built``: who builds the memory anew, from the trajectories that it holds, for this arm
    alone; "": it is used as it is."""

    about: str
    overrides: tuple[str, ...]
    built: Built = ""


_ALONE = ("memory=null", "samem=null")

ARMS = {
    BASELINE: Arm("no memory", _ALONE),
    "act": Arm("no memory and no thoughts", (*_ALONE, "agent.thoughts=false")),
    "react": Arm(
        "no memory, a thought before each action (ReAct; Yao et al. 2023, without their examples)",
        (*_ALONE, "agent.thoughts=true"),
    ),
    "retry": Arm(
        "no memory, up to three tries of each item, success within these",
        (*_ALONE, "eval.tries=3", "agent.note_tokens=0"),
    ),
    "reflexion": Arm(
        "as retry, and before each further try the policy notes what went wrong (Reflexion; Shinn et al. 2023)",
        (*_ALONE, "eval.tries=3", "agent.note_tokens=96"),
    ),
    "trajectory": Arm("raw trajectories of like tasks", ("samem=null", "memory.mode=trajectory")),
    "direct": Arm("the hierarchy, its principles as they are", ("samem=null", "memory.mode=direct")),
    "full": Arm("the hierarchy, its principles instantiated, actions regulated", ("samem=null", "memory.mode=full")),
    "unregulated": Arm("as full, without regulation", ("samem=null", "memory.mode=full", "memory.attempts=0")),
    "shuffled": Arm(
        "the control of full: shuffled words, objections at random", ("samem=null", "memory.mode=shuffled")
    ),
    "builder-offline": Arm("as full, built anew without a model", ("samem=null", "memory.mode=full"), "offline"),
    "builder-strong": Arm("as full, built anew by memory.builder.model", ("samem=null", "memory.mode=full"), "strong"),
    "builder-policy": Arm(
        "as full, built anew by the policy's base model", ("samem=null", "memory.mode=full"), "policy"
    ),
    "samem": Arm("values of thoughts in states (SAMem), no hierarchy", ("memory=null",)),
    "samem-thought": Arm("as samem, thoughts are what is valued", ("memory=null", "samem.store=thought")),
    "samem-action": Arm("as samem, actions are what is valued", ("memory=null", "samem.store=action")),
    "both": Arm("the hierarchy as in full, and SAMem", ("memory.mode=full",)),
}

_MAY_DIFFER = ("agent", "memory", "samem", "eval")
"""Sections that an arm may change: model, world and items are the same for all."""

_OF_USE = ("database", "table", "recall", "positive_only", "no_repeats", "model")
"""Settings of SAMem that say how a table is used; with others it is another table."""

MIN_THOUGHT_TOKENS = 48
"""A thought and an action take fewer tokens than this only by luck; cut off, a reply is most likely malformed."""


def parse_arm(text: str) -> tuple[str, Arm]:
    """The file name and the arm of what a user wrote: a name of :data:`ARMS`, with ``+key.sub=value`` upon it.

    Raises:
        ConfigError: no such arm.
    """
    name, *more = text.strip().split("+")
    if name not in ARMS:
        known = "\n".join(f"  {key}: {arm.about}" for key, arm in ARMS.items())
        raise ConfigError(f"--arms: {name!r} is none of\n{known}")
    arm = ARMS[name]
    return re.sub(r"[^A-Za-z0-9._=+-]+", "-", text.strip()), Arm(arm.about, (*arm.overrides, *more), arm.built)


def parse_arms(texts: Sequence[str]) -> dict[str, Arm]:
    """The arms by name, the baseline first, whether named or not. Raises ConfigError: unknown, or given twice."""
    arms = {BASELINE: ARMS[BASELINE]}
    for text in texts:
        name, arm = parse_arm(text)
        if name in arms and name != BASELINE:
            raise ConfigError(f"--arms: {name} is given twice; give each arm once")
        arms[name] = arm
    return arms


def arm_config(base: Config, name: str, arm: Arm) -> Config:
    """``base`` under the arm's overrides.

    Raises:
        ConfigError: it needs a memory and there is none, or changes what all arms share.
    """
    if base.memory is None and any(override.startswith("memory.") for override in arm.overrides):
        raise ConfigError(
            f"--arms {name}: needs a memory; add a section memory: or give memory.store=sqlite:///FILE (one that "
            "`saga memory build` made)"
        )
    if base.samem is None and "samem=null" not in arm.overrides:
        raise ConfigError(
            f"--arms {name}: needs values of thoughts; add a section samem: or give samem.database=FILE (one that "
            "`saga samem learn` wrote to)"
        )
    config = config_from(base.model_dump(mode="json"), list(arm.overrides))
    changed = [
        section
        for section in Config.model_fields
        if section not in _MAY_DIFFER and getattr(config, section) != getattr(base, section)
    ]
    for field in ("eval.tasks", "eval.seeds", "agent.context_tokens", "agent.concurrency"):
        section, name_in = field.split(".")
        if getattr(getattr(config, section), name_in) != getattr(getattr(base, section), name_in):
            changed.append(field)
    if changed:
        raise ConfigError(f"--arms {name}: changes {', '.join(changed)}, which all arms share; give it to all of them")
    if config.agent.thoughts > base.agent.thoughts and config.agent.max_new_tokens < MIN_THOUGHT_TOKENS:
        raise ConfigError(
            f"agent.max_new_tokens: {config.agent.max_new_tokens} cuts off a thought with its action (arm {name}); "
            f"give agent.max_new_tokens=96, or at least {MIN_THOUGHT_TOKENS}"
        )
    return config


def learns_anew(base: Config, config: Config) -> bool:
    """Whether an arm's table is another one than that of ``base``, to be learnt anew from the same trajectories."""
    if base.samem is None or config.samem is None:
        return False
    one, other = (
        {name: value for name, value in settings.model_dump().items() if name not in _OF_USE}
        for settings in (base.samem, config.samem)
    )
    return one != other
