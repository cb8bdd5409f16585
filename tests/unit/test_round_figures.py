import pytest

from envs.base import Task
from memory.usage import Check, Choice, Instantiation, MemoryUse, Outcome, Regulation
from train.config import GrpoConfig
from train.optimise import baselines, is_loud, signal_of
from train.round_figures import Changes, in_use, level_changes, regulation_figures, round_credits
from train.round_report import block
from train.run import group_jobs
from train.trajectory import Episode, Step

pytestmark = pytest.mark.unit


def test_changes_tell_new_merged_and_retired_items() -> None:
    before = {"e1": (1, "candidate"), "p1": (3, "candidate"), "p2": (3, "audited"), "p3": (3, "retired")}
    after = {
        "e1": (1, "candidate"),
        "e2": (1, "candidate"),
        "p1": (3, "retired"),  # merged into p4
        "p2": (3, "retired"),
        "p3": (3, "retired"),
        "p4": (3, "candidate"),
        "p5": (3, "retired"),  # written, and merged at once
    }
    assert level_changes(before, after, ["p1", "p5"]) == {
        "episode": Changes(added=1),
        "procedure": Changes(),
        "principle": Changes(added=1, merged=2, retired=1),
    }
    assert in_use(after) == {"episode": 2, "procedure": 0, "principle": 1}


def step(
    regulation: Regulation | None, *, valid: bool = True, admissible: list[str] | None = None, reward: float = 0.0
) -> Step:
    return Step(
        index=0, observation="", text="", valid=valid, admissible=admissible, regulation=regulation, reward=reward
    )


def regulation(choice: Choice, first: Outcome, *proposals: str) -> Regulation:
    return Regulation(proposals=proposals, checks=(Check(item="r", attempt=0, outcome=first),), choice=choice)


def played(name: str, *steps: Step, group: str = "", won: bool = False, memory: MemoryUse | None = None) -> Episode:
    return Episode(
        id=name, phase="p", env="household", task="easy/1", task_type="pick", seed=0, group=group, won=won,
        score=float(won), steps=list(steps), memory=memory,
    )  # fmt: skip


def test_rescued_and_overridden_actions_are_known_from_admissible_lists() -> None:
    listed = ["open a", "look"]
    figures = regulation_figures(
        [
            played(
                "p/0",
                step(regulation("resampled", "violated", "take b", "open a"), admissible=listed),  # rescued
                step(regulation("resampled", "violated", "look", "take b"), valid=False, admissible=listed),  # worse
                step(regulation("fallback", "violated", "look", "look"), admissible=listed),
                step(regulation("original", "idle", "look"), admissible=listed),
                step(None),
            )
        ]
    )
    assert figures.checked == 4
    assert figures.trigger_rate == 0.75
    assert figures.resampled == 3
    assert (figures.rescued, figures.overridden) == (1, 1)


def test_without_admissible_lists_nobody_knows_what_was_rescued() -> None:
    figures = regulation_figures([played("p/0", step(regulation("resampled", "violated", "take b", "open a")))])
    assert (figures.rescued, figures.overridden) == (None, None)
    assert regulation_figures([]).trigger_rate is None


def test_those_without_memory_are_the_control_of_those_with_it() -> None:
    use = MemoryUse(
        mode="full",
        snapshot="s",
        instantiations=(
            Instantiation(item="shown", text="do"),
            Instantiation(item="suppressed", reason="no"),
            Instantiation(item="t-1", text="a raw trajectory"),
        ),
    )
    entries = round_credits([played("p/0", memory=use, won=True), played("p/1", won=False)], "demo")
    assert [(entry.item, entry.episode, entry.outcome, entry.instantiated) for entry in entries] == [
        ("shown", "run:demo/p/0", 1.0, 1),
        ("suppressed", "run:demo/p/0", 1.0, 0),
        ("shown", "run:demo/p/1", 0.0, 0),
    ]


def test_a_group_has_a_baseline_with_memory_and_one_without() -> None:
    (jobs,) = group_jobs("grpo-0001", [Task("household", "easy/1", "pick")], 5, 7, free=2)
    assert [(job.id, job.group, job.guided) for job in jobs] == [
        ("grpo-0001/000-0", "grpo-0001/000", True),
        ("grpo-0001/000-1", "grpo-0001/000", True),
        ("grpo-0001/000-2", "grpo-0001/000", True),
        ("grpo-0001/000-3", "grpo-0001/000-free", False),
        ("grpo-0001/000-4", "grpo-0001/000-free", False),
    ]
    assert {job.seed for job in jobs} == {7}
    group = [
        played(job.id, step(None, reward=float(not job.guided)), group=job.group, won=not job.guided) for job in jobs
    ]
    assert [len(part) for part in baselines(group)] == [3, 2]
    grpo = GrpoConfig(tasks="household/easy/train")
    # All with memory lost and all without it won: neither differs from its own baseline.
    assert not is_loud(group, grpo)
    group[0] = played("grpo-0001/000-0", step(None, reward=1.0), group=group[0].group, won=True)
    assert is_loud(group, grpo)
    assert signal_of([group], grpo) == {"pick": [1, 1]}


def test_the_block_of_a_round() -> None:
    figures = {
        "episodes_played": 40, "success": 0.5, "invalid_rate": 0.25, "repeated_rate": None,
        "tasks": 10, "zero_signal_tasks": 4,
        "episodes": 3, "procedures": 1, "principles": 2,
        "principles_added": 2, "principles_merged": 1, "principles_retired": 0,
        "principles_now_audited": 1, "principles_now_retired": 1, "predicates_now_passed": 1,
        "trigger_rate": 0.1, "resamples": 3, "rescued": None, "overridden": 0,
        "states": 7, "thoughts": 9, "valued": 1, "lowest_value": 0.0, "mean_value": 0.25, "highest_value": 1.0,
    }  # fmt: skip
    assert block(figures) == [
        "play: 40 episodes, success 50.0%, invalid actions 25.0%, repeated –, 4 of 10 tasks without signal",
        "memory: 3 episodes; 1 procedures; 2 principles (2 added, 1 merged, 0 retired)",
        "principles: 1 audited, 1 retired",
        "predicates: 1 passed",
        "regulation: in scope on 10.0% of checked steps, 3 resamples, – actions rescued, 0 overridden",
        "table: 7 states, 9 thoughts, 1 with a value from 0.000 to 1.000, mean 0.250",
    ]
    play = {name: figures[name] for name in ("episodes_played", "success", "invalid_rate", "repeated_rate")}
    assert block(play) == ["play: 40 episodes, success 50.0%, invalid actions 25.0%, repeated –"]
