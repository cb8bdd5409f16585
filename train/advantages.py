"""Returns and advantages of the episodes of a group: pure functions, one per formula."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Literal

from train.config import GrpoConfig
from train.trajectory import Episode

STD_EPSILON = 1e-4
"""Added to the standard deviation of a group (the value that TRL uses)."""

Baseline = Literal["mean", "leave_one_out"]


def penalised_rewards(episode: Episode, invalid_penalty: float) -> list[float]:
    """The environment's reward of each step, less ``invalid_penalty`` where the action was invalid or malformed."""
    return [step.reward - invalid_penalty * (not step.valid) for step in episode.steps]


def discounted_returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """R_t = r_t + gamma R_{t+1} for each step."""
    returns: list[float] = []
    value = 0.0
    for reward in reversed(rewards):
        value = reward + gamma * value
        returns.append(value)
    return returns[::-1]


def group_advantages(returns: Sequence[float], *, normalise_std: bool, baseline: Baseline = "mean") -> list[float]:
    """Advantage of each member of a group: its return less the baseline, in units of the group's spread.

    A_i = (R_i - b_i) / (std R + 1e-4) with the sample standard deviation, as in GRPO (arXiv 2402.03300);
    ``normalise_std=False`` leaves the division out, as in Dr. GRPO (arXiv 2503.20783). The baseline b_i is the group's
    mean, or the mean of the others (RLOO, arXiv 2402.14740), which makes R_i - b_i larger by n / (n - 1). Equal returns
    give exact zeros (the floating-point mean of equal numbers need not equal them, and the division would blow that
    up), and so does a single member.
    """
    if not returns or min(returns) == max(returns):
        return [0.0] * len(returns)
    mean, count = fmean(returns), len(returns)
    stretch = count / (count - 1) if baseline == "leave_one_out" else 1.0
    scale = stdev(returns) + STD_EPSILON if normalise_std else 1.0
    return [stretch * (value - mean) / scale for value in returns]


def step_advantages(
    returns: Sequence[Sequence[float]],
    anchors: Sequence[Sequence[str]],
    *,
    normalise_std: bool,
    baseline: Baseline = "mean",
) -> list[list[float]]:
    """GiGPO's step advantages (arXiv 2505.10978): steps of a group that began in the same state compared.

    Args:
        returns: discounted return of each step of each episode.
        anchors: the state in which that step acted; equal strings are the same state.

    Returns:
        For each step the group advantage of its return among all steps of equal anchor; 0 where it has no other.
    """
    places: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for episode, states in enumerate(anchors):
        for step, state in enumerate(states):
            places[state].append((episode, step))
    advantages = [[0.0] * len(values) for values in returns]
    for members in places.values():
        values = group_advantages([returns[i][t] for i, t in members], normalise_std=normalise_std, baseline=baseline)
        for (i, t), value in zip(members, values, strict=True):
            advantages[i][t] = value
    return advantages


def token_advantages(episodes: Sequence[Episode], settings: GrpoConfig) -> list[list[float]]:
    """The advantage of every step of every episode of a group, which all tokens of the step share.

    That of the episode (its undiscounted return in the group) plus ``step_weight`` (omega) times that of the step
    (GiGPO); with omega 0 it is GRPO. The anchor of a step is its ``state``, else its exact observation.
    """
    rewards = [penalised_rewards(episode, settings.invalid_penalty) for episode in episodes]
    of_episodes = group_advantages(
        [sum(values) for values in rewards], normalise_std=settings.normalise_std, baseline=settings.baseline
    )
    if not settings.step_weight:
        return [[advantage] * len(values) for advantage, values in zip(of_episodes, rewards, strict=True)]
    of_steps = step_advantages(
        [discounted_returns(values, settings.gamma) for values in rewards],
        [[step.state or step.observation for step in episode.steps] for episode in episodes],
        normalise_std=settings.normalise_std,
        baseline=settings.baseline,
    )
    return [
        [advantage + settings.step_weight * of_step for of_step in steps]
        for advantage, steps in zip(of_episodes, of_steps, strict=True)
    ]


def has_signal(advantages: Sequence[Sequence[float]]) -> bool:
    """Whether any step's advantage differs from zero; a group without signal moves no weight."""
    return any(value != 0.0 for steps in advantages for value in steps)
