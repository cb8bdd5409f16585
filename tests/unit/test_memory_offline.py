from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

import memory
from envs.base import Task
from envs.household import PLACES, TASK_TYPES
from memory.offline import Built, OfflineSettings, build
from memory.records import (
    EpisodeItem,
    MemoryRecordError,
    PrincipleItem,
    ProcedureItem,
    TraceStep,
    Trajectory,
)
from memory.store import Store
from tests.planted import FAMILIES, Family, PlantedEnv, compare, explore, trace_step, trajectories

pytestmark = pytest.mark.unit


def principles(built: Built) -> list[PrincipleItem]:
    return [item for item in built.items if isinstance(item, PrincipleItem)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [2, 3])
def test_the_planted_rule_is_found(family: Family, seed: int) -> None:
    built = build(trajectories(explore(family, seed, 60)))
    fresh = explore(family, seed, 30, first=1000)
    matches = [compare(item.predicate, built.grammar, fresh) for item in principles(built) if item.predicate]
    assert any(match.found for match in matches)


def test_a_found_rule_says_what_the_world_does() -> None:
    words = PlantedEnv("exception", 3).words
    exempt = PlantedEnv("exception", 3).exempt
    built = build(trajectories(explore("exception", 3, 60)))
    (rule,) = [item for item in principles(built) if item.exceptions]
    assert rule.condition == f"you are about to `{words.form('second')}`"
    assert rule.guidance == f"do `{words.say('prime', '{1}')}` first"
    assert rule.exceptions == (f"{{0}} is a {exempt}",)
    assert words.refusal in rule.mechanism
    assert rule.scope == "all tasks of planted"
    verdict = next(judgement.verdict for judgement in built.judgements if judgement.item == rule.id)
    assert verdict["harmful"]
    assert verdict["violations"] == verdict["refused"] > 0
    assert verdict["evidence"][0]["quote"] == words.refusal


def test_outcomes_that_depend_on_nothing_teach_no_rule_about_outcomes() -> None:
    for family in FAMILIES:
        told = trajectories(explore(family, 0, 60))
        outcomes = [one.success for one in told]
        random.Random(family).shuffle(outcomes)
        shuffled = [one.model_copy(update={"success": new}) for one, new in zip(told, outcomes, strict=True)]
        judged = [judgement.verdict["tested_on"] for judgement in build(shuffled).judgements]
        assert "failed" not in judged


def wander(number: int) -> Trajectory:
    """Random actions that end in success at a random early time, or in failure at the cap: only time tells them."""
    rng = random.Random(number)
    env = PlantedEnv("precondition", 0, max_steps=30)
    result = env.reset(Task("planted", f"wander/{number}", "planted"), number)
    end = rng.choice([rng.randint(4, 12), 30])
    steps: list[TraceStep] = []
    while len(steps) < end and not result.done:
        after = env.step(action := rng.choice(env.admissible()))
        steps.append(trace_step(len(steps), result, action, after))
        result = after
    return Trajectory(
        source=f"test#{number}",
        world="planted",
        grammar="g",
        task=str(number),
        task_type="planted",
        success=end < 30,
        steps=tuple(steps),
    )


def test_what_merely_tracks_time_is_no_rule() -> None:
    built = build([wander(number) for number in range(80)])
    assert all(judgement.verdict["tested_on"] == "refused" for judgement in built.judgements)


def test_a_build_is_deterministic_and_independent_of_repetition() -> None:
    told = trajectories(explore("order", 2, 40))
    first, second = build(told), build([*told, *told[:5]])
    assert [item.id for item in first.items] == [item.id for item in second.items]
    assert [link.id for link in first.links] == [link.id for link in second.links]
    assert first.judgements == second.judgements


def test_equal_claims_of_two_rounds_are_one_record() -> None:
    told = trajectories(explore("prohibition", 2, 80))
    early, late = build(told[:60], round=1), build(told, round=2)
    shared = {item.id for item in principles(early)} & {item.id for item in principles(late)}
    assert any(item.predicate and item.id in shared for item in principles(late))


def test_a_store_takes_all_that_is_built(tmp_path: Path) -> None:
    for family in FAMILIES:
        told = trajectories(explore(family, 2, 40))
        built = build(told)
        store = Store(f"sqlite:///{tmp_path / family}.db")
        store.add_trajectories(told)
        report = store.write(built.items, built.links, {one.item: one.verdict for one in built.judgements})
        assert report.rejected == []
        assert set(report.accepted) == {item.id for item in built.items}
        for judgement in built.judgements:
            assert [one.verdict for one in store.judgements(judgement.item, "harm")] == [judgement.verdict]
        store.close()


def test_every_level_is_there_and_linked_to_the_next() -> None:
    built = build(trajectories(explore("order", 2, 40)))
    assert [item.level for item in built.items] == sorted(item.level for item in built.items)
    assert sum(isinstance(item, EpisodeItem) for item in built.items) == 40
    levels = {item.id: item.level for item in built.items}
    for item in built.items:
        supports = [link for link in built.links if link.upper == item.id and link.relation == "supports"]
        assert supports
        assert all(levels.get(link.lower, 0) == item.level - 1 for link in supports)


def test_only_harmful_rules_become_predicates() -> None:
    for family in FAMILIES:
        built = build(trajectories(explore(family, 2, 60)))
        verdicts = {judgement.item: judgement.verdict for judgement in built.judgements}
        for item in principles(built):
            assert not item.predicate or verdicts[item.id]["harmful"]


def test_rare_rules_stay_advice() -> None:
    told = trajectories(explore("order", 2, 60))
    built = build(told, settings=OfflineSettings(min_trigger_rate=1.0))
    assert principles(built)
    assert not any(item.predicate for item in principles(built))


def test_episodes_tell_obstacles_and_cite_steps() -> None:
    played = [one for one in explore("precondition", 2, 40) if any(one.broke)]
    built = build(trajectories(played))
    told = {item.trajectory: item for item in built.items if isinstance(item, EpisodeItem)}
    refusal = PlantedEnv("precondition", 2).words.refusal
    for one in played:
        item = told[one.trajectory.id]
        assert any("was refused" in obstacle for obstacle in item.obstacles)
        refused = {step.index for step in one.trajectory.steps if step.result == refusal}
        assert not refused & {key.step for key in item.key_steps}


def test_odd_trajectories_are_taken() -> None:
    def odd(source: str, *steps: TraceStep, success: bool | None = None) -> Trajectory:
        return Trajectory(source=source, world="w", grammar="g", task="t", success=success, steps=steps)

    silent = odd("a#1", TraceStep(index=0, observation="x", thought="hm"))
    built = build([odd("a#0"), silent, odd("a#2", TraceStep(index=0, observation="", action="go", result=""))])
    assert [(item.outcome, item.level) for item in built.items if isinstance(item, EpisodeItem)] == [
        ("unknown", 1),
        ("unknown", 1),
    ]
    assert build([]).items == []


def test_worlds_are_built_apart() -> None:
    first, second = explore("order", 0, 1)[0].trajectory, explore("order", 1, 1)[0].trajectory
    with pytest.raises(MemoryRecordError, match="build each world and grammar apart"):
        build([first, second])


def test_procedures_warn_in_their_own_slots() -> None:
    built = build(trajectories(explore("precondition", 2, 60)))
    procedures = [item for item in built.items if isinstance(item, ProcedureItem) and item.task_type]
    assert procedures
    for item in procedures:
        text = " ".join(item.steps)
        for pitfall in item.pitfalls:
            slots = {f"{{{number}}}" for number in range(9) if f"{{{number}}}" in pitfall}
            assert all(slot in text for slot in slots)


def test_the_builder_knows_no_world() -> None:
    folder = Path(memory.__file__).parent
    modules = ("alignment", "conditions", "contrast", "grammar", "harm", "lifting", "occasions", "offline", "phrasing")
    code = " ".join((folder / f"{module}.py").read_text() for module in modules)
    words = set(re.findall(r"[a-z_]+", code.lower()))
    names = {name.lower() for name in (*PLACES, *(place for places in PLACES.values() for place in places))}
    verbs = {"clean", "heat", "cool", "teleport", "pour", "dunk", "activate", "focus", "thermometer", "stove"}
    assert not words & (names | verbs | {task_type.lower() for task_type in TASK_TYPES})
    for form in ("go to", "take {", "put {", "open {", "move {", "use {", "pick up"):
        assert form not in code
