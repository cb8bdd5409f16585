"""The language-model builder against a real vLLM server with schema-constrained decoding.

The model is a 135M one, which judges nothing well. What is tested is the form and the grounding: constrained answers
end by themselves and fit their schema, whatever they say; what they cite is checked, and counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memory.answers import ANSWERS, AnswerLimits, bounded, longest
from memory.build_prompts import instructions
from memory.build_report import BuildReport
from memory.builder import LanguageModelBuilder
from memory.builder_settings import BuilderSettings, LanguageModelSettings
from memory.grounding import check_evidence, occurs
from memory.language_model import Answer, LanguageModel, LanguageModelFault, read_answer
from memory.records import (
    EpisodeItem,
    Evidence,
    KeyStep,
    Link,
    PrincipleItem,
    ProcedureItem,
    TraceStep,
    Trajectory,
)
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


LIMITS = AnswerLimits(characters=80, items=2, operations=1)
"""Small enough for a context of 4096 tokens, and for a slow machine."""


def settings(server: VLLMServer, **fields: object) -> LanguageModelSettings:
    made = {"url": server.url, "model": server.name, "answers": LIMITS, "max_tokens": 1200, "reasks": 0, "tries": 2}
    return LanguageModelSettings.model_validate(made | {"timeout_s": 600} | fields)


def seed(store: Store, trajectories: list[Trajectory]) -> None:
    """What an earlier build of a better model left: episodes of two trajectories, a procedure, and a principle."""
    named: dict[str, Any] = {"world": "rooms", "grammar": "g", "builder": "seed"}
    cites = [Evidence(trajectory=told.id, step=0, quote="go to box 1") for told in trajectories[:2]]
    episodes = [
        EpisodeItem(
            **named,
            task_type="put",
            trajectory=told.id,
            goal=told.goal,
            outcome="success" if told.success else "failure",
            key_steps=(KeyStep(step=0, what="It is closed"),),
        )
        for told in trajectories[:2]
    ]
    procedure = ProcedureItem(**named, task_type="put", when="put a thing into a closed box", steps=("open {1}",))
    principle = PrincipleItem(**named, task_type="put", condition="the box is closed", guidance="open it first")
    links = [
        *(Link(lower=c.trajectory, upper=e.id, evidence=(c,)) for c, e in zip(cites, episodes, strict=True)),
        *(Link(lower=e.id, upper=procedure.id, evidence=(c,)) for c, e in zip(cites, episodes, strict=True)),
        Link(lower=procedure.id, upper=principle.id, evidence=tuple(cites)),
    ]
    assert store.write([*episodes, procedure, principle], links).rejected == []


def cached(folder: Path) -> Iterator[tuple[str, Answer, dict[str, Any]]]:
    """(schema, answer, the answer's JSON) of every call that was paid."""
    for file in folder.glob("*.json"):
        call = json.loads(file.read_text())
        answer = Answer(**call["answer"])
        yield call["request"]["schema"]["title"], answer, json.loads(answer.text)


def ungrounded(said: dict[str, Any], trajectories: list[Trajectory]) -> int:
    """Claims and citations of an answer whose quote stands in that step of no trajectory at all."""
    claims = [*said.get("key_steps", []), *said.get("obstacles", []), *said.get("evidence", [])]
    claims += [citation for operation in said.get("operations", []) for citation in operation["evidence"]]
    steps = [step for told in trajectories for step in told.steps]
    return sum(
        not claim["quote"].strip()
        or not any(step.index == claim["step"] and occurs(claim["quote"], step) for step in steps)
        for claim in claims
    )


@pytest.mark.parametrize("stage", ANSWERS)
def test_constrained_answers_are_complete_and_fit_their_schema(
    stage: str, vllm_server: VLLMServer, tmp_path: Path
) -> None:
    schema = ANSWERS[stage]
    messages = instructions(stage).messages("Forms of the actions: go to {0}\n\n[E1] failure\n  0: go to box 1 -> No.")
    model = LanguageModel(settings(vllm_server), tmp_path)
    answer = model.ask(messages, schema)
    model.close()
    value, _, problem = read_answer(answer, schema)
    assert value is not None, problem
    assert answer.finish == "stop"
    assert 0 < answer.tokens_out <= longest(bounded(schema, LIMITS))
    assert (model.spend.calls, model.spend.retried, model.spend.estimated) == (1, {}, 0)
    again = LanguageModel(settings(vllm_server), tmp_path)
    again.ask(messages, schema)
    again.close()
    assert (again.spend.calls, again.spend.cached) == (0, 1)


def test_a_prompt_that_is_too_long_is_a_fault_that_says_so(vllm_server: VLLMServer, tmp_path: Path) -> None:
    model = LanguageModel(settings(vllm_server), tmp_path)
    with pytest.raises(LanguageModelFault, match=r"HTTP 400: .*4096"):
        model.ask([{"role": "user", "content": "lamp " * 4000}], ANSWERS["harm"])
    model.close()


def test_a_build_with_a_small_model_loses_nothing(
    vllm_server: VLLMServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trajectories = [trajectory(number) for number in range(6)]
    made = BuilderSettings(
        builder="model",
        model=settings(vllm_server, reasks=1),
        episodes_per_call=2,
        step_characters=120,
        trajectory_characters=1200,
        repairs=0,
    )
    assert made.model is not None
    with Store(f"sqlite:///{tmp_path}/memory.db") as store:
        store.add_trajectories(trajectories)
        seed(store, trajectories)
        model = LanguageModel(made.model, tmp_path / "calls")
        report = LanguageModelBuilder(store, model, made, tmp_path).build()
        model.close()
        with capsys.disabled():
            print("\n" + "\n".join(report.lines()))
        calls = list(cached(tmp_path / "calls"))
        check_form(report, calls)
        check_grounding(report, [said for _, _, said in calls], store, trajectories)
        # Building again asks nothing anew of what was answered.
        again = LanguageModel(made.model, tmp_path / "calls")
        LanguageModelBuilder(store, again, made, tmp_path).build(1)
        again.close()
        assert again.spend.calls == 0


def check_form(report: BuildReport, calls: list[tuple[str, Answer, dict[str, Any]]]) -> None:
    """Every answer is complete and valid, and the report counts each, by its stage."""
    counts = report.spend["answers"]
    assert {"EpisodeAnswer", "ProcedureAnswer", "PrincipleAnswer", "HarmAnswer"} <= counts.keys()
    for name, of_stage in counts.items():
        paid = sum(schema == name for schema, _, _ in calls)
        assert of_stage["answers"] == of_stage["complete"] == of_stage["valid"] == paid
    assert report.spend["calls"] == len(calls)
    assert set(report.spend["unusable"]) <= {"wrong evidence or operation"}
    assert not [line for line in report.lines() if line.startswith("the server")]


def check_grounding(
    report: BuildReport, said: list[dict[str, Any]], store: Store, trajectories: list[Trajectory]
) -> None:
    """What was written stands in the steps; what does not stand was refused, and counted."""
    for level in (1, 2, 3):
        for stored in store.items(level):
            for link in store.links(upper=stored.id):
                assert link.evidence
                for cited in link.evidence:
                    assert check_evidence(cited, store.trajectory(cited.trajectory)) is None
    valid = sum(counts["valid"] for counts in report.spend["answers"].values())
    grounded = sum(counts["grounded"] for counts in report.spend["answers"].values())
    assert report.spend["unusable"].get("wrong evidence or operation", 0) == valid - grounded
    assert sum(ungrounded(answer, trajectories) > 0 for answer in said) <= valid - grounded
    assert report.written["episode"] + report.waiting == len(trajectories) - 2
    assert not report.failed
