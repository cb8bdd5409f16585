"""Updates, clusters, forgetting, choice and recall, against values worked out by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as settings_of
from hypothesis import strategies as st

from memory.clusters import Clusters
from memory.embedding import HashingEmbedder, Vectors
from memory.experience import Experience, Visit, read_experience, rewards_or_outcome
from memory.forgetting import Trial, Verdict, judge_offline
from memory.qlearning import (
    Candidate,
    best_in_training,
    best_tried,
    epsilon_at,
    q_target,
    q_update,
    step_size,
    untried_value,
)
from memory.qtable import QTable
from memory.recall import StateGuide
from memory.samem_settings import SamemSettings
from tests.vault import trajectory

pytestmark = pytest.mark.unit


def settings(**changes: object) -> SamemSettings:
    base = {"threshold": 0.999, "thought_threshold": 1.0, "alpha": 0.5, "gamma": 0.5, "judge": "none"}
    return SamemSettings.model_validate({**base, **changes})


def visit(step: int, state: str, thought: str, *rewards: float, **more: object) -> Visit:
    return Visit(step, state, thought, rewards or (0.0,), **more)  # type: ignore[arg-type]


def episode(name: str, *visits: Visit, ended: bool = True) -> Experience:
    return Experience(f"t-{name}", name, visits, ended)


def values(table: QTable) -> dict[tuple[str, str], float]:
    return {
        (table.states[table.state_of[n]].text, founder.text): table.values[n]
        for n, founder in enumerate(table.thoughts)
    }


# ---- formulas


def test_formulas() -> None:
    assert q_update(0.2, 1.0, 0.5) == pytest.approx(0.6)
    assert q_target([1.0], 0.4, 0.5) == pytest.approx(1.2)  # 1 + 0.5 * 0.4
    assert q_target([1.0], None, 0.5) == 1.0  # the end
    assert q_target([0.0, 1.0, 2.0], 4.0, 0.5) == pytest.approx(1.5)  # 0 + 0.5 + 0.5 + 0.5
    assert [step_size("1/N", 0.3, n) for n in (1, 2, 4)] == [1.0, 0.5, 0.25]
    assert step_size("constant", 0.3, 7) == 0.3
    assert [epsilon_at(n, 0.5, 0.1, 4) for n in (0, 1, 2, 4, 9)] == pytest.approx([0.5, 0.4, 0.3, 0.1, 0.1])


def test_exploiting_without_exploration_takes_the_highest_then_the_most_tried_then_the_first_in_the_alphabet() -> None:
    never = Candidate("a", 9.0, 0)
    assert best_tried([never]) is None
    assert best_tried([never, Candidate("b", 0.1, 1), Candidate("c", 0.2, 1)]) == 2
    assert best_tried([Candidate("b", 0.2, 1), Candidate("c", 0.2, 3)]) == 1
    assert best_tried([Candidate("c", 0.2, 3), Candidate("b", 0.2, 3)]) == 1
    assert best_tried([Candidate("b", 0.0, 3), Candidate("c", -1.0, 1)]) == 0
    assert best_tried([Candidate("b", 0.0, 3), Candidate("c", -1.0, 1)], above=0.0) is None


def test_in_training_the_least_tried_of_equals_is_taken_and_the_bonus_shrinks_with_visits() -> None:
    chance = random.Random(0)
    assert best_in_training([], 0.0, chance) is None
    assert best_in_training([Candidate("a", 0.0, 2), Candidate("b", 0.0, 0)], 0.0, chance) == 1
    # 0.5 + 1/2 against 0.7 + 1/4: the bonus of the fourth try against that of the sixteenth
    assert best_in_training([Candidate("a", 0.5, 3), Candidate("b", 0.7, 15)], 1.0, chance) == 0
    assert best_in_training([Candidate("a", 0.5, 3), Candidate("b", 0.7, 15)], 0.4, chance) == 1
    equal = [Candidate("a", 0.0, 0), Candidate("b", 0.0, 0)]
    assert {best_in_training(equal, 0.0, chance) for _ in range(50)} == {0, 1}


def test_the_unknown_promises_less_where_the_words_never_led_on_and_where_much_was_tried() -> None:
    assert untried_value(0.3, trials=0, led_on=0, visits=0) == pytest.approx(0.3)
    assert untried_value(0.3, trials=5, led_on=1, visits=0) == pytest.approx(0.1)
    assert untried_value(0.3, trials=5, led_on=1, visits=9) == pytest.approx(0.05)


# ---- clusters


def unit(*angles: float) -> Vectors:
    return np.array([[np.cos(angle), np.sin(angle)] for angle in np.radians(angles)], dtype=np.float32)


def test_a_vector_joins_the_nearest_founder_and_founders_do_not_drift() -> None:
    clusters = Clusters(float(np.cos(np.radians(20))))
    # 15 joins 0; 30 is 30 from the founder 0, though 15 from its last member: it founds; 16 is nearer to 30 than to 0.
    numbers, founders = clusters.assign(unit(0, 15, 30, 16, 90))
    assert numbers.tolist() == [0, 0, 1, 1, 2]
    assert founders == [0, 2, 4]
    found, cosines = clusters.nearest(unit(70, 60, 200))
    assert found.tolist() == [2, -1, -1]
    assert cosines[0] == pytest.approx(np.cos(np.radians(20)), abs=1e-5)
    # A snapshot of the two oldest does not see the third; 30 then is the nearest to 45 and far from 90.
    assert clusters.nearest(unit(90, 45), first=2)[0].tolist() == [-1, 1]


@settings_of(deadline=None)
@given(st.lists(st.integers(0, 71), min_size=1, max_size=40), st.integers(1, 10))
def test_assigning_at_once_or_in_parts_or_approximately_is_the_same(steps: list[int], size: int) -> None:
    vectors = unit(*(5.0 * step for step in steps))
    whole, parts = Clusters(0.98), Clusters(0.98)
    numbers = whole.assign(vectors)[0].tolist()
    assert numbers == [n for i in range(0, len(steps), size) for n in parts.assign(vectors[i : i + size])[0].tolist()]
    graph = Clusters(0.98, exact_up_to=3)
    assert numbers == graph.assign(vectors)[0].tolist()


def test_a_snapshot_of_a_graph_sees_the_oldest_only() -> None:
    clusters = Clusters(0.999, exact_up_to=3)
    clusters.assign(unit(*range(0, 300, 10)))
    assert clusters.nearest(unit(290), first=10)[0].tolist() == [-1]
    assert clusters.nearest(unit(290, 50), first=30)[0].tolist() == [29, 5]


# ---- the table


def test_an_episode_is_learnt_from_its_end_back() -> None:
    table = QTable(settings(), HashingEmbedder())
    barrier = table.learn([episode("1", visit(0, "hall", "walk"), visit(3, "door", "open", 1.0))])
    # open: 0 + 0.5 (1 - 0) = 0.5; then walk: 0 + 0.5 (0 + 0.5 * 0.5 - 0) = 0.125
    assert values(table) == {("hall", "walk"): 0.125, ("door", "open"): 0.5}
    assert [(u.trajectory, u.step, u.reward, u.target, u.before, u.after) for u in barrier.updates] == [
        ("t-1", 3, 1.0, 1.0, 0.0, 0.5),
        ("t-1", 0, 0.0, 0.25, 0.0, 0.125),
    ]
    assert (barrier.steps, barrier.matched, barrier.states, barrier.thoughts) == (2, 0, 2, 2)
    again = table.learn([episode("2", visit(0, "hall", "shout", -1.0), visit(1, "hall", "walk"))])
    # walk ends the episode here: 0.125 + 0.5 (0 - 0.125); shout: 0.5 (-1 + 0.5 * max(0.0625, 0) - 0)
    assert values(table)["hall", "walk"] == 0.0625
    assert values(table)["hall", "shout"] == pytest.approx(-0.484375)
    assert again.matched == 2


def test_an_episode_that_breaks_off_relies_on_its_last_state() -> None:
    table = QTable(settings(), HashingEmbedder())
    table.learn([episode("1", visit(0, "door", "open", 1.0))])
    barrier = table.learn([episode("2", visit(0, "hall", "walk"), visit(1, "door", "look"), ended=False)])
    assert [(u.step, u.target) for u in barrier.updates] == [(0, 0.25)]  # 0.5 * the 0.5 of open; look taught nothing
    assert values(table)["door", "look"] == 0.0


def test_n_step_returns() -> None:
    table = QTable(settings(n_step=2, alpha=1.0), HashingEmbedder())
    walk = [
        visit(n, f"room {name}", "walk", reward)
        for n, (name, reward) in enumerate(zip("abcd", (0, 2, 0, 4), strict=True))
    ]
    barrier = table.learn([episode("1", *walk)])
    # d: 4; c: 0 + 0.5 * 4; b: 2 + 0.5 * 0 + 0.25 * max Q(d) = 3; a: 0 + 0.5 * 2 + 0.25 * max Q(c) = 1.5
    assert [update.target for update in barrier.updates] == [4.0, 2.0, 3.0, 1.5]


def test_step_size_of_one_over_n_is_the_mean() -> None:
    table = QTable(settings(step_size="1/N"), HashingEmbedder())
    for number, reward in enumerate((1.0, 0.0, 0.5)):
        table.learn([episode(str(number), visit(0, "door", "open", reward))])
    assert table.values == [0.5]


def test_a_replay_makes_each_value_the_mean_target() -> None:
    table = QTable(settings(sweeps=1), HashingEmbedder())
    ways = [
        episode("1", visit(0, "hall", "walk"), visit(1, "door", "open", 1.0)),
        episode("2", visit(0, "hall", "walk"), visit(1, "door", "open", 0.0)),
        episode("3", visit(0, "hall", "walk"), visit(1, "yard", "dig", 0.4), ended=True),
    ]
    table.learn(ways)
    visits = list(table.visits)
    table.replay(ways)
    # open: (1 + 0) / 2; dig: 0.4; walk: 0.5 * (0.5 + 0.5 + 0.4) / 3, in one sweep, as the youngest thoughts come first
    assert values(table) == pytest.approx({("hall", "walk"): 0.7 / 3, ("door", "open"): 0.5, ("yard", "dig"): 0.4})
    assert table.visits == visits


def test_a_replay_settles_a_circle() -> None:
    table = QTable(settings(sweeps=60, initial=1.0), HashingEmbedder())
    there_and_back = episode("1", visit(0, "hall", "walk"), visit(1, "yard", "return"), visit(2, "hall", "win", 1.0))
    table.learn([there_and_back])
    table.replay([there_and_back])
    assert values(table) == pytest.approx({("hall", "win"): 1.0, ("yard", "return"): 0.5, ("hall", "walk"): 0.25})
    broken_off = episode("2", visit(0, "yard", "rest"), ended=False)
    table.learn([broken_off])
    table.replay([broken_off])  # what came after the rest is not known
    assert values(table)["yard", "return"] == pytest.approx(0.5)


def test_untried_options_count_with_the_initial_value() -> None:
    table = QTable(settings(initial=1.0, alpha=1.0), HashingEmbedder())
    options = ("open", "look")
    table.learn([episode("1", visit(0, "hall", "walk"), visit(1, "door", "open", options=options))])
    assert values(table) == {("door", "open"): 0.0, ("hall", "walk"): 0.5}  # 0.5 * 1, of the look that was not tried
    table.learn([episode("2", visit(0, "hall", "walk"), visit(1, "door", "look", 0.2, options=options))])
    assert values(table)["hall", "walk"] == pytest.approx(0.1)


def test_rewards_of_steps_without_a_thought_belong_to_the_one_before() -> None:
    of = trajectory()
    first, second = of.steps
    table = QTable(settings(alpha=1.0), HashingEmbedder())
    found = read_experience(of, ["a", "b"], "thought")
    assert found.visits == (visit(0, "a", "Open it.", 0.0, 1.0),)
    table.learn([found])
    assert table.values == [0.5]  # 0 + 0.5 * 1
    actions = read_experience(of, ["a", "b"], "action")
    assert [item.thought for item in actions.visits] == ["pull lever", "enter Door"]
    assert read_experience(of.model_copy(update={"status": "truncated"}), ["a", "b"], "action").ended is False
    silent = of.model_copy(update={"steps": (first, second.model_copy(update={"reward": 0.0})), "score": 0.5})
    assert [step.reward for step in rewards_or_outcome(silent).steps] == [0.0, 0.5]
    assert rewards_or_outcome(of) == of


@settings_of(deadline=None)
@given(st.permutations(range(6)), st.integers(0, 1000))
def test_the_order_in_which_episodes_finish_changes_nothing(order: list[int], seed: int) -> None:
    def batches(seed: int) -> list[list[Experience]]:
        chance = random.Random(seed)
        return [
            [
                episode(
                    f"{batch}-{number}",
                    *(
                        visit(step, f"place {chance.choice('abcdef')}", chance.choice("xyz"), chance.random())
                        for step in range(chance.randint(1, 5))
                    ),
                )
                for number in range(6)
            ]
            for batch in range(2)
        ]

    one, other = (QTable(settings(threshold=0.7, judge="offline"), HashingEmbedder(), judge_offline) for _ in range(2))
    for batch in batches(seed):
        one.learn(batch)
        other.learn([batch[number] for number in order])
    assert one.snapshot().id == other.snapshot().id
    assert one.values == other.values


def test_readers_see_the_snapshot_they_were_given() -> None:
    table = QTable(settings(), HashingEmbedder())
    table.learn([episode("1", visit(0, "hall", "walk", 1.0))])
    before = table.snapshot()
    name = before.id
    guide = StateGuide(before, table.settings, "e")
    table.learn([episode("2", visit(0, "hall", "run", 4.0), visit(1, "cellar", "dig", 2.0))])
    assert guide.recall("hall").thought == "walk"
    assert guide.recall("hall", ["run", "walk"]).thought == "walk"
    assert guide.recall("cellar").state is None
    assert before.id == name != table.snapshot().id
    assert StateGuide(table.snapshot(), table.settings, "e").recall("hall").thought == "run"


def test_like_states_of_other_tasks_tell_what_to_try() -> None:
    table = QTable(settings(transfer=0.8), HashingEmbedder())
    options = ("dance", "push", "wait")
    table.learn(
        [
            episode("1", visit(0, "Task: x. At the door", "push", 1.0, options=options)),
            episode("2", visit(0, "Task: x. At the door", "wait", options=options)),
            episode("3", visit(0, "Task: y. At the door", "dance", options=options)),
        ]
    )  # fmt: skip
    # In task y nothing is known of push, but it earned 0.5 at the door of task x.
    training = StateGuide(table.snapshot(), table.settings, "e", training=True)
    for task in ("y", "z"):  # z is a state that there was none of
        found = training.recall(f"Task: {task}. At the door", options)
        assert (found.thought, found.value, found.visits) == ("push", 0.4, 0)
    # Without exploration too, as it is no mere initial value.
    assert StateGuide(table.snapshot(), table.settings, "e").recall("Task: z. At the door", options).thought == "push"
    assert table.snapshot().shuffled(1).elsewhere != table.snapshot().elsewhere
    alone = QTable(settings(), HashingEmbedder())
    assert alone.snapshot().elsewhere.value(alone.settings, None, "Task: y. At the door", "push") == 0.0


def test_by_analogy_a_thought_is_worth_its_share_in_the_best_of_like_states() -> None:
    table = QTable(settings(analogy=True, alpha=1.0), HashingEmbedder())
    table.learn(
        [
            episode("1", visit(0, "Task: x. At the door", "push", 4.0)),
            episode("2", visit(0, "Task: x. At the door", "knock", 3.0)),
            episode("3", visit(0, "Task: y. At the door", "push", 1.0)),
            episode("4", visit(0, "Task: x. In the hall", "bow", 2.0)),
        ]
    )
    found = table.snapshot().candidates(1, ["bow", "dance", "knock", "push"], "Task: y. At the door")
    # knock: three quarters of the best at the door of x; bow: all of the best, in no like state; dance: unknown
    assert {one.text: one.value for one in found} == {"bow": 1.0, "dance": 0.0, "knock": 0.75, "push": 1.0}
    assert [one.text for one in found if one.known] == ["bow", "knock"]


def test_what_only_repeats_is_not_recalled_again_in_the_episode() -> None:
    table = QTable(settings(no_repeats=True), HashingEmbedder())
    table.learn([episode("1", visit(0, "hall", "walk", 2.0)), episode("2", visit(0, "hall", "run", 1.0))])
    guide = StateGuide(table.snapshot(), table.settings, "e")
    assert guide.recall("hall").thought == "walk"
    guide.repeated("walk")
    assert guide.recall("hall").thought == "run"
    assert StateGuide(table.snapshot(), table.settings, "e").recall("hall").thought == "walk"


# ---- forgetting


def test_the_offline_rule() -> None:
    def verdict(trials: int, led_on: int) -> Verdict:
        return judge_offline(Trial(3, "hall", "walk", -0.5, trials, led_on))

    assert verdict(2, 0) == Verdict(3, False, "tried 2 times, led on 0 times", "offline", -0.5)
    assert verdict(1, 0).sound
    assert verdict(9, 1).sound


def test_what_always_leads_back_is_forgotten_at_once_where_that_is_asked_for() -> None:
    table = QTable(settings(forget_idle=True, initial=0.5), HashingEmbedder())
    waits = [visit(step, "hall", "wait") for step in range(3)]
    barrier = table.learn([episode("1", *waits, visit(3, "hall", "walk"), visit(4, "yard", "dig", 1.0))])
    assert [(table.thoughts[verdict.thought].text, verdict.sound) for verdict in barrier.verdicts] == [("wait", False)]
    assert {table.thoughts[thought].text for thought in table.forgotten} == {"wait"}
    assert [found.text for found in table.snapshot().candidates(0, ["wait", "walk"])] == ["walk"]


def test_the_lowest_of_more_than_five_valued_thoughts_is_judged_and_a_forgotten_one_leaves_recall_and_max() -> None:
    asked: list[Trial] = []

    def judge(trial: Trial) -> Verdict:
        asked.append(trial)
        return Verdict(trial.thought, trial.value > -0.5, "because", "test", trial.value)

    table = QTable(settings(judge="offline"), HashingEmbedder(), judge)
    table.learn([episode(str(n), visit(0, "hall", f"t{n}", -1.0 - n)) for n in range(5)])
    assert not asked  # five are not more than five
    barrier = table.learn([episode("5", visit(0, "hall", "t5", -0.2))])
    assert [(trial.text, trial.value) for trial in asked] == [("t4", -2.5)]
    assert [verdict.sound for verdict in barrier.verdicts] == [False]
    assert table.values[4] == 0.0  # reset, and yet not the best of negative ones:
    assert table.forgotten == {4}
    recall = StateGuide(table.snapshot(), table.settings, "e").recall("hall")
    assert (recall.thought, recall.value) == ("t5", -0.1)
    assert StateGuide(table.snapshot(), table.settings, "e").recall("hall", ["t4"]).thought == ""
    # What leads to the hall is worth 0.5 * -0.1, not 0.5 * 0; a forgotten thought learns no more.
    table.learn([episode("6", visit(0, "yard", "enter"), visit(1, "hall", "t4", -9.0))])
    assert values(table)["yard", "enter"] == pytest.approx(-0.025)
    assert table.values[4] == 0.0
    # Five valued ones are left: nobody is judged until a sixth comes.
    assert len(asked) == 1
    table.learn([episode("7", visit(0, "hall", "t7", -0.4))])
    assert asked[-1].text == "t3"


def test_a_sound_thought_is_not_asked_about_again() -> None:
    asked: list[int] = []

    def judge(trial: Trial) -> Verdict:
        asked.append(trial.thought)
        return Verdict(trial.thought, True, "fine", "test", trial.value)

    table = QTable(settings(judge="offline"), HashingEmbedder(), judge)
    for _ in range(3):
        table.learn([episode(str(n), visit(0, "hall", f"t{n}", -1.0 - n)) for n in range(6)])
    assert asked == [5]
    assert not table.forgotten


# ---- recall


def test_recall_matches_states_by_cosine_and_tells_what_it_did() -> None:
    table = QTable(settings(threshold=0.6, thought_threshold=0.6), HashingEmbedder())
    table.learn([episode("1", visit(0, "a red door is closed", "open the door", 1.0))])
    guide = StateGuide(table.snapshot(), table.settings, "e")
    recall = guide.recall("the red door is closed")
    assert recall.state == 0
    assert 0.6 < recall.similarity < 1
    assert (recall.thought, recall.value, recall.visits, recall.mode) == ("open the door", 0.5, 1, "replace")
    assert guide.followed(recall, "open that door").followed is True
    assert guide.followed(recall, "sing a song").followed is False
    none = guide.recall("snow falls on high mountains")
    assert (none.state, none.thought, none.followed) == (None, "", None)
    assert guide.followed(none, "x").followed is None


def test_epsilon_explores() -> None:
    table = QTable(settings(), HashingEmbedder())
    table.learn([episode("1", visit(0, "hall", "walk", 1.0))])
    free = StateGuide(table.snapshot(), table.settings, "e", epsilon=1.0, training=True).recall("hall")
    assert (free.thought, free.explored, free.state) == ("", True, 0)
    guide = StateGuide(table.snapshot(), table.settings, "e", epsilon=0.5, training=True)
    explored = sum(guide.recall("hall").explored for _ in range(200))
    assert 70 < explored < 130


def test_positive_only() -> None:
    table = QTable(settings(positive_only=True), HashingEmbedder())
    table.learn([episode("1", visit(0, "hall", "walk", -1.0))])
    assert StateGuide(table.snapshot(), table.settings, "e").recall("hall").thought == ""
    assert StateGuide(table.snapshot(), table.settings, "e", training=True).recall("hall").thought == "walk"
    table.learn([episode("2", visit(0, "hall", "run", 1.0))])
    assert StateGuide(table.snapshot(), table.settings, "e").recall("hall").thought == "run"


def test_shuffled_values_are_the_same_values_elsewhere() -> None:
    table = QTable(settings(), HashingEmbedder())
    table.learn([episode(str(n), visit(0, f"room {n}x", "walk", float(n))) for n in range(8)])
    control = table.snapshot().shuffled(0)
    assert sorted(control.values) == sorted(table.values)
    assert list(control.values) != table.values
    assert control.id == table.snapshot().shuffled(0).id != table.snapshot().id


def test_settings_that_contradict_themselves() -> None:
    with pytest.raises(ValueError, match=r"epsilon_end: 0.5 is above epsilon_start 0.3"):
        SamemSettings(epsilon_end=0.5)
