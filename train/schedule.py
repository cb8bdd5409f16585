"""The phases of a run by name, and what each round plays and learns from: pure functions of the configuration.

A round's phases are collect -> learn -> distil -> audit -> validate -> optimise -> evaluate -> checkpoint. Rollouts of
the optimise phase are those that the next round learns and distils from; there is a separate collect phase only where
no optimisation left any: in every round without ``grpo``, and in the first one with it (where ``collect`` is left out,
the first round has no memory yet). What the last round's optimisation plays is learnt from by no further round.
"""

from __future__ import annotations

from train.config import Config, GrpoConfig

WARM_START = "warm-start"
REJECTION = "rejection"
WITHOUT = "-without"
"""Ends the phase of an evaluation in which memory and table, which there are, have no part."""


def iteration_phase(iteration: int) -> str:
    return f"grpo-{iteration:04d}"


def collect_phase(round: int) -> str:
    return f"collect-{round:04d}"


def learn_phase(round: int) -> str:
    return f"learn-{round:04d}"


def distil_phase(round: int) -> str:
    return f"distil-{round:04d}"


def audit_phase(round: int) -> str:
    return f"audit-{round:04d}"


def validate_phase(round: int) -> str:
    return f"validate-{round:04d}"


def round_phase(round: int) -> str:
    """The round's checkpoint."""
    return f"round-{round:04d}"


def round_evaluation(config: Config, round: int) -> str:
    """The phase that evaluates after ``round``; the last one's is the run's result."""
    return "eval-final" if round == config.rounds else f"eval-round-{round:04d}"


def round_iterations(grpo: GrpoConfig, round: int) -> range:
    """The iterations of round 1, 2, …; they are counted over all rounds.

    >>> list(round_iterations(GrpoConfig(tasks="household/easy/train", iterations=3), 2))
    [4, 5, 6]
    """
    return range((round - 1) * grpo.iterations + 1, round * grpo.iterations + 1)


def trains(config: Config) -> bool:
    """Whether the weights of the policy change."""
    return bool(config.warm_start or config.rejection or config.grpo)


def has_rounds(config: Config) -> bool:
    """Whether there is anything to play in a round."""
    return bool(config.collect or config.grpo)


def has_knowledge(config: Config) -> bool:
    """Whether the run has a memory of its own: where there is something to remember, and the policy plays for it."""
    return config.remembers and has_rounds(config)


def collects(config: Config, round: int) -> bool:
    """Whether ``round`` has a collect phase: where no optimisation left rollouts for it."""
    return config.collect is not None and (config.grpo is None or round == 1)


def sources(config: Config, round: int) -> list[str]:
    """The phases whose rollouts memory and table learn from in ``round``; each rollout is learnt from once."""
    found = [REJECTION] if config.rejection is not None and round == 1 else []
    if collects(config, round):
        found.append(collect_phase(round))
    if config.grpo is not None and round > 1:
        found += [iteration_phase(number) for number in round_iterations(config.grpo, round - 1)]
    return found


def played_in(config: Config, round: int) -> list[str]:
    """The phases of ``round`` in which the policy plays training episodes (those before the rounds with the first)."""
    found = [REJECTION] if config.rejection is not None and round == 1 else []
    if collects(config, round):
        found.append(collect_phase(round))
    if config.grpo is not None:
        found += [iteration_phase(number) for number in round_iterations(config.grpo, round)]
    return found
