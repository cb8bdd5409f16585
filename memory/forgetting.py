"""Whether a thought is logically sound, or is to be forgotten: by an offline rule, or by a language model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from memory.language_model import LanguageModel, LanguageModelFault

OFFLINE_TRIALS = 2
"""Trials that the offline rule wants to see."""


@dataclass(frozen=True)
class Trial:
    """The lowest-valued thought of a state. ``led_on``: trials after which the state was another, or that earned."""

    thought: int
    state: str
    text: str
    value: float
    trials: int
    led_on: int


@dataclass(frozen=True)
class Verdict:
    """``judge``: ``offline`` or a model's name; ``value``: what the thought was worth when it was judged."""

    thought: int
    sound: bool
    reason: str
    judge: str
    value: float


Judge = Callable[[Trial], Verdict]


def judge_offline(trial: Trial) -> Verdict:
    """Unsound: tried at least twice, and each time refused, or followed by the same state, without any reward."""
    told = f"tried {trial.trials} times, led on {trial.led_on} times"
    sound = trial.led_on > 0 or trial.trials < OFFLINE_TRIALS
    return Verdict(trial.thought, sound, told, "offline", trial.value)


class SoundnessAnswer(BaseModel):
    """``sound``: whether the thought makes sense in this state; ``reason``: why, in one sentence."""

    sound: bool
    reason: str


_QUESTION = """\
You judge thoughts of an agent in a text world. A thought is sound when it fits what is known in the state and could \
lead towards the task. It is unsound when it contradicts the state, repeats what was done, or rests on something that \
is not there. A low value alone makes no thought unsound. Answer as a JSON object: sound (true or false) and reason \
(one sentence)."""


def judge_by_model(model: LanguageModel) -> Judge:
    """Ask ``model``; where it gives no usable answer the thought stays, and the reason says why."""

    def judge(trial: Trial) -> Verdict:
        question = (
            f"State: {trial.state}\nThought: {trial.text}\n"
            f"Learnt value: {trial.value:.3f} ({trial.trials} trials, {trial.led_on} of them led to another state)"
        )
        messages = [{"role": "system", "content": _QUESTION}, {"role": "user", "content": question}]
        try:
            answer = model.structured(messages, SoundnessAnswer)
        except LanguageModelFault as fault:
            return Verdict(trial.thought, True, f"not judged: {fault}", model.name, trial.value)
        return Verdict(trial.thought, answer.sound, " ".join(answer.reason.split()), model.name, trial.value)

    return judge


def make_judge(kind: Literal["offline", "model", "none"], model: LanguageModel | None = None) -> Judge | None:
    """The judge that the settings name; None: nothing is forgotten.

    Raises:
        ValueError: a model is asked for and none is given.
    """
    if kind == "none":
        return None
    if kind == "offline":
        return judge_offline
    if model is None:
        raise ValueError("judge: 'model' needs a language model (model.url and model.model); give one or set offline")
    return judge_by_model(model)
