"""The three readings of a condition agree: truth over occasions, CEL in a predicate's context, English."""

from __future__ import annotations

import random

import cel
import pytest

from memory.conditions import Condition, candidates, exemptions, general_candidates
from memory.lifting import fit_grammar, learn_refusals, read_runs
from memory.occasions import ANY, GOAL, HISTORY, OBSERVATION, RESULT, gather
from memory.predicates import CONTEXT, compile_predicate, history_entry, make_context
from memory.records import Predicate, TraceStep, Trajectory
from tests.planted import FAMILIES, explore, trajectories

pytestmark = pytest.mark.unit


def long_trajectory() -> Trajectory:
    """70 steps, more than a context's history holds; the first action is never repeated."""
    actions = ["open box 1", *(f"walk to box {number % 4}" for number in range(69))]
    return Trajectory(
        source="test#1",
        world="w",
        grammar="g",
        task="t",
        steps=tuple(
            TraceStep(index=index, observation="Box 1 is here.", action=action, result=f"{action}.")
            for index, action in enumerate(actions)
        ),
    )


def unflagged(trajectory: Trajectory) -> Trajectory:
    """Refusals are told by their text alone."""
    steps = tuple(step.model_copy(update={"valid": None}) for step in trajectory.steps)
    return trajectory.model_copy(update={"steps": steps})


SOURCES = {
    **{family: trajectories(explore(family, 1, 12)) for family in FAMILIES},
    "unflagged": [unflagged(one) for one in trajectories(explore("precondition", 1, 30))],
    "long": [long_trajectory()],
}


@pytest.mark.parametrize("source", SOURCES)
def test_truth_and_cel_agree(source: str) -> None:
    told = SOURCES[source]
    grammar = fit_grammar(told)
    refusals = learn_refusals(told, grammar)
    assert (source == "long") == (not refusals)
    runs = read_runs(told, grammar, refusals)
    verbs = sorted({event.verb for run in runs for event in run.events})
    rng = random.Random(0)
    compared = 0
    for verb, at in gather(runs, verbs).items():
        conditions = candidates(at, pairs=True) + exemptions(at) if verb else general_candidates(at, verbs, 3)
        by_name: dict[tuple[str, bool], list[Condition]] = {}
        for condition in conditions:
            by_name.setdefault((condition.name, condition.positive), []).append(condition)
        for same in by_name.values():
            for condition in rng.sample(same, min(2, len(same))):
                predicate = Predicate(trigger="true", requirement=condition.cel(refusals))
                program = cel.compile(compile_predicate(predicate).source)
                holds = condition.holds(at)
                for n in rng.sample(range(len(at)), min(10, len(at))):
                    run, event = runs[at.runs[n]], at.events[n]
                    before = run.events[: at.positions[n]]
                    context = make_context(
                        event.action,
                        grammar.parse,
                        observation=event.source.observation,
                        goal=run.trajectory.goal,
                        history=[history_entry(e.action, grammar.parse, e.result, e.source.valid) for e in before],
                    )
                    assert (program.execute(context) == 1) == holds[n], (condition, event)
                    compared += 1
    assert compared >= 100


def test_occasions_see_as_much_as_a_context() -> None:
    entry = CONTEXT["history"].element
    assert entry is not None
    sizes = (CONTEXT["history"].size, CONTEXT["observation"].size, entry.fields["result"].size, CONTEXT["goal"].size)
    assert sizes == (HISTORY, OBSERVATION, RESULT, GOAL)


def test_a_form_that_the_world_calls_valid_is_not_unknown_though_nothing_came_of_it() -> None:
    """Every gate is open already, whoever opens it; nobody knows how to sing."""

    def one(number: int) -> Trajectory:
        told = [("walk", f"place {number}", "You walk.", True), ("open", f"gate {number}", "It is open already.", True)]
        told += [("open", f"gate {number}", "It is open already.", True), ("sing", f"song {number}", "What?", False)]
        steps = tuple(
            TraceStep(index=i, observation="", action=f"{verb} {name}", result=answer, valid=valid)
            for i, (verb, name, answer, valid) in enumerate(told)
        )
        return Trajectory(source=f"test#{number}", world="w", grammar="g", task="t", steps=steps)

    told = [one(number) for number in range(8)]
    grammar = fit_grammar(told)
    refusals = learn_refusals(told, grammar)
    assert refusals == ("It is open already.", "What?")
    runs = read_runs(told, grammar, refusals)
    at = gather(runs, ["walk {0}", "open {0}", "sing {0}"])[""]
    [forms] = [one.forms for one in general_candidates(at, [], 1) if one.name == "form"]
    assert "sing {0}" not in forms
    assert set(forms) == {"open {0}", "walk {0}"}


def test_words() -> None:
    opened, walked = ("open {0}", 0, 1), ("walk to {0}", ANY, ANY)
    assert Condition("done", True, (opened,)).words() == "`open {1}` has been done before"
    assert Condition("done", False, (walked,)).words() == "`walk to …` has not been done before"
    assert Condition("kind", False, slot=1, text="box").words() == "{1} is not a box"
    assert Condition("current", True, (opened,)).words() == "`open {1}` is the latest `open …`"


def test_texts_are_quoted() -> None:
    strange = Condition("kind", True, text='a "b" (c)')
    predicate = Predicate(trigger="true", requirement=strange.cel(()))
    program = cel.compile(compile_predicate(predicate).source)
    for name, holds in (('a "b" (c) 3', 1), ('a "b" (c)', 1), ('a "b" c', 2), ('a "b" (c) d', 2)):
        context = make_context("x", lambda _, name=name: ("x", (name,)), observation="")
        assert program.execute(context) == holds
