"""Settings of SAMem: the section ``samem`` of a configuration. Imports nothing heavy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from memory.builder_settings import LanguageModelSettings
from memory.settings import EmbedderSettings, Settings

Share = Annotated[float, Field(ge=0, le=1)]
Cosine = Annotated[float, Field(ge=-1, le=1)]
Count = Annotated[int, Field(ge=1)]

IDENTITY = ("state_key", "store", "lifted", "threshold", "thought_threshold", "embedder")
"""The settings that say what a state and a thought are: a table is learnt, and used, with one choice of them."""


class SamemSettings(Settings):
    """How states and thoughts are told apart, and how their values are learnt, forgotten and used.

    Neither paper nor code gives alpha, gamma and the epsilon schedule: the defaults are ours.
    """

    state_key: Literal["state", "scene", "task"] = "state"
    """What a state is made of. ``state``: the whole summary. The coarser baselines: ``scene``, the task and what is
    seen now, without what was done; ``task``, the task alone."""
    store: Literal["thought", "action"] = "thought"
    """What is valued in a state: the agent's thoughts, or the actions as they were played."""
    lifted: bool = False
    """The valued thoughts are not those that were written, but the actions with roles for names (``store: action``: the
    actions as they are), and where the admissible ones are recorded, these are the agent's options."""
    threshold: Cosine = 0.85
    """A summary whose cosine with the nearest state is at least this joins it; else it founds a new state."""
    thought_threshold: Cosine = 0.85
    """The same for the thoughts of one state."""
    embedder: EmbedderSettings = EmbedderSettings()

    step_size: Literal["constant", "1/N"] = "constant"
    """``1/N``: of the N-th update of a thought (the mean of its targets, where these do not move)."""
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.3
    """The constant step size."""
    gamma: Share = 0.95
    initial: float = 0.0
    """Value of a thought that was never tried. Above what can be earned (optimistic), it makes an agent try
    everything."""
    transfer: Share = 0.0
    """A thought that was never tried in a state is worth at least this share of the mean value that the same words have
    in like states of other tasks (:func:`memory.summary.situation`), and the less of ``initial`` the less often the
    words led on anywhere, and the more often the state was visited (:func:`memory.qlearning.untried_value`). 0: it is
    worth ``initial``."""
    analogy: bool = False
    """A thought that was never tried in a state is worth at least so much of the state's highest value as the same
    words are worth, on average, of that of like states of other tasks (of any state, if there is no like one)."""
    n_step: Count = 1
    """Rewards that are summed before the best next value is taken."""
    sweeps: Count = 10
    """How often a replay of episodes goes through all of them (:meth:`memory.qtable.QTable.replay`)."""

    epsilon_start: Share = 0.3
    epsilon_end: Share = 0.1
    epsilon_episodes: Count = 100
    """Training episodes over which epsilon falls linearly from ``epsilon_start`` to ``epsilon_end``."""
    bonus: Annotated[float, Field(ge=0)] = 0.0
    """Optimistic bonus in training: ``bonus`` / sqrt(visits + 1) is added to a value when a thought is chosen, never
    when one is learnt. 0: none."""

    recall: Literal["replace", "hint"] = "replace"
    """``replace``: the recalled thought takes the place of the agent's own (``store: action``: the recalled action is
    played). ``hint``: it is shown, the agent thinks."""
    positive_only: bool = False
    """Recall only thoughts of a value above ``initial`` (of positive value, where that is 0): where nothing good is
    known, the agent thinks for itself."""

    no_repeats: bool = False
    """A thought that brought nothing new to the episode is not recalled again in that state until it ends. Values only
    change at barriers: without this, an agent that follows them may go round in a circle."""

    forget_above: Count = 5
    """Once more than so many thoughts of a state have values other than zero, the lowest one is judged."""
    forget_idle: bool = False
    """Forget every thought that the offline rule finds unsound, whatever its rank: one that always leads back to its
    state without a reward is, with gamma below 1, never better than the best other thought there."""
    judge: Literal["offline", "model", "none"] = "offline"
    """Who judges: the rule of :mod:`memory.forgetting`, a language model, or nobody (nothing is forgotten)."""
    model: LanguageModelSettings | None = None
    """The one that judges with ``judge: model``."""

    @model_validator(mode="after")
    def _epsilon_falls(self) -> SamemSettings:
        if self.epsilon_end > self.epsilon_start:
            raise ValueError(
                f"epsilon_end: {self.epsilon_end} is above epsilon_start {self.epsilon_start}; exploration decays: "
                "give at most that"
            )
        return self

    def identity(self) -> dict[str, object]:
        """The part of the settings that a table is bound to."""
        return {name: value for name, value in self.model_dump(mode="json").items() if name in IDENTITY}
