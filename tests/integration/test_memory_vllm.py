"""The language-model builder against a real vLLM server with schema-constrained decoding.

The model is a 135M one, which judges nothing well. What is tested is the form: constrained answers fit their schema,
whatever they say; what they cite is checked; nothing is lost and all is counted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from memory.build_prompts import EpisodeAnswer, HarmAnswer, PredicateAnswer, instructions
from memory.builder import LanguageModelBuilder
from memory.builder_settings import BuilderSettings, LanguageModelSettings
from memory.grounding import check_evidence
from memory.language_model import LanguageModel, LanguageModelFault, read_answer
from memory.records import TraceStep, Trajectory
from memory.store import Store
from train.vllm_server import VLLMServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]  # the first test waits for the server's start


def trajectory(number: int) -> Trajectory:
    """A lamp into a box that has to be opened first; odd numbers forget it."""
    actions = [("go to box 1", "The box 1 is closed."), ("open box 1", "You open the box 1.")]
    success = number % 2 == 0
    last = (
        f"put lamp {number} in box 1",
        f"You put the lamp {number} in the box 1." if success else "Nothing happens.",
    )
    told = [*actions, last] if success else [actions[0], last]
    steps, seen = [], f"A room with a box 1. You hold the lamp {number}."
    for index, (action, result) in enumerate(told):
        valid = result != "Nothing happens."
        steps.append(TraceStep(index=index, observation=seen, action=action, result=result, valid=valid))
        seen = result
    return Trajectory(
        source=f"made-up#{number}",
        world="rooms",
        grammar="g",
        task=str(number),
        task_type="put",
        goal=f"put lamp {number} in box 1",
        success=success,
        score=float(success),
        steps=tuple(steps),
    )


def settings(server: VLLMServer, **fields: object) -> LanguageModelSettings:
    made = {"url": server.url, "model": server.name, "max_tokens": 600, "reasks": 0, "tries": 2, "timeout_s": 600}
    return LanguageModelSettings.model_validate(made | fields)


def test_constrained_answers_fit_their_schema(vllm_server: VLLMServer, tmp_path: Path) -> None:
    model = LanguageModel(settings(vllm_server), tmp_path)
    try:
        for schema, name in ((EpisodeAnswer, "episode"), (HarmAnswer, "harm"), (PredicateAnswer, "predicate")):
            answer = model.ask(instructions(name).messages("Steps:\n[0]\n    action: go to box 1"), schema)
            value, kind, problem = read_answer(answer, schema)
            # Cut off is the one thing that a schema cannot prevent.
            assert value is not None or kind == "cut off", problem
            assert answer.tokens_out > 0
        assert (model.spend.calls, model.spend.retried, model.spend.estimated) == (3, {}, 0)
        again = LanguageModel(settings(vllm_server), tmp_path)
        again.ask(instructions("harm").messages("Steps:\n[0]\n    action: go to box 1"), HarmAnswer)
        assert (again.spend.calls, again.spend.cached) == (0, 1)
        again.close()
    finally:
        model.close()


def test_a_prompt_that_is_too_long_is_a_fault_that_says_so(vllm_server: VLLMServer, tmp_path: Path) -> None:
    model = LanguageModel(settings(vllm_server), tmp_path)
    with pytest.raises(LanguageModelFault, match=r"HTTP 400: .*2048"):
        model.ask([{"role": "user", "content": "lamp " * 4000}], HarmAnswer)
    model.close()


def test_a_build_with_a_small_model_loses_nothing(
    vllm_server: VLLMServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trajectories = [trajectory(number) for number in range(4)]
    made = BuilderSettings(
        builder="model",
        model=settings(vllm_server),
        episodes_per_call=2,
        step_characters=120,
        trajectory_characters=1200,
        repairs=0,
    )
    assert made.model is not None
    with Store(f"sqlite:///{tmp_path}/memory.db") as store:
        store.add_trajectories(trajectories)
        model = LanguageModel(made.model, tmp_path / "calls")
        report = LanguageModelBuilder(store, model, made, tmp_path).build()
        model.close()
        with capsys.disabled():
            print("\n" + "\n".join(report.lines()))
        unusable = model.spend.unusable
        assert set(unusable) <= {
            "cut off",
            "wrong evidence or operation",
        }  # constrained decoding: always JSON that fits
        assert report.written["episode"] + report.waiting == len(trajectories)
        assert not report.failed
        # What was written stands in the steps.
        links = [link for stored in store.items(1) for link in store.links(upper=stored.id)]
        assert len(links) == report.written["episode"]
        assert all(
            check_evidence(cited, store.trajectory(cited.trajectory)) is None
            for link in links
            for cited in link.evidence
        )
        # Building again asks nothing anew of what was answered.
        again = LanguageModel(made.model, tmp_path / "calls")
        LanguageModelBuilder(store, again, made, tmp_path).build(1)
        again.close()
        assert again.spend.calls == 0
