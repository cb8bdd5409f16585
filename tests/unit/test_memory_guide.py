"""One episode's memory over a real store and real predicates, with hashing for vectors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.audit_checks import Audit, Check
from memory.builder_settings import LanguageModelSettings
from memory.embedding import HashingEmbedder
from memory.guide import FEEDBACK, HEADER, Guide, Memory, learn_words, ledger_entries, shuffle_words
from memory.instantiate import Situation
from memory.language_model import LanguageModel
from memory.predicates import PredicateHost
from memory.records import (
    EpisodeItem,
    Evidence,
    Link,
    MemoryRecordError,
    Predicate,
    PrincipleItem,
    ProcedureItem,
    TraceStep,
    Trajectory,
)
from memory.settings import MemorySettings
from memory.store import LedgerEntry, Store
from memory.usage import Regulation
from tests.scripted_server import Reply, ScriptedServer
from train.evaluate import spend_line, spent_since

pytestmark = pytest.mark.unit

GRAMMAR = {"world": "w", "grammar": "g"}
ACTIONS = (
    *("open box 1", "take pen 1 from box 1", "open bag 1", "take pen 2 from bag 1", "open box 2"),
    *("take cup 1 from box 2", "go to desk 1", "go to desk 2", "go to box 1", "go to bag 1"),
)
SEEN = "A box 1, a bag 1 and a desk 1 with a pen 1."
SITUATION = Situation("get the pen from box 1", "A box 1 and a desk 1.", "get")

OPEN_FIRST = PrincipleItem(
    **GRAMMAR,
    condition="you take from a box",
    guidance="open it first",
    predicate=Predicate(
        trigger='action.verb == "take {0} from {1}"',
        requirement='history.exists(h, h.verb == "open {0}" && h.args[0] == action.args[1])',
    ),
)
NO_DESK = PrincipleItem(**GRAMMAR, condition="a desk is near", guidance="leave the desk alone", task_type="put")
BROKEN = PrincipleItem(
    **GRAMMAR,
    condition="you get a pen",
    guidance="raise",
    predicate=Predicate(trigger="action.args[4] == 'x'", requirement="true"),
)
PROCEDURE = ProcedureItem(**GRAMMAR, when="a pen is in a box", steps=("open {0}", "take {1} from {0}"))


def words(text: str) -> int:
    return len(text.split())


@pytest.fixture(scope="module")
def host() -> Iterator[PredicateHost]:
    with PredicateHost(workers=1, deadline=10.0) as host:
        yield host


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(f"sqlite:///{tmp_path}/memory.db") as store:
        fill(store)
        yield store


def fill(store: Store) -> None:
    """Two trajectories, and every item resting on the first."""
    steps = tuple(
        TraceStep(index=i, observation=SEEN, action=action, result="Done.") for i, action in enumerate(ACTIONS)
    )
    won = Trajectory(source="s1", **GRAMMAR, task="t1", task_type="get", goal="get a pen", success=True, steps=steps)
    lost = won.model_copy(update={"source": "s2", "task": "t2", "goal": "fetch a cup", "success": False})
    store.add_trajectories([won, lost])
    episode = EpisodeItem(**GRAMMAR, task_type="get", trajectory=won.id, goal="get a pen", outcome="success")
    evidence = (Evidence(trajectory=won.id, step=0),)
    rules = [OPEN_FIRST, NO_DESK, BROKEN]
    links = [Link(lower=won.id, upper=episode.id, evidence=evidence)]
    links.append(Link(lower=episode.id, upper=PROCEDURE.id, evidence=evidence))
    links += [Link(lower=PROCEDURE.id, upper=rule.id, evidence=evidence) for rule in rules]
    harm = {"harmful": True, "evidence": [evidence[0].model_dump()]}
    report = store.write([episode, PROCEDURE, *rules], links, {rule.id: harm for rule in (OPEN_FIRST, BROKEN)})
    assert report.rejected == []
    for rule in (OPEN_FIRST, BROKEN):
        store.set_status(rule.id, "audited", "test")
        store.judge(rule.id, "audit", passed(0.1).record())


def passed(rate: float) -> Audit:
    """An audit that saw a predicate fire on ``rate`` of the steps."""
    return Audit((Check("trigger_rate", "passed", rate, 0.0, 1.0, 1, 9, "fires"),), 9, 9)


def memory(store: Store, host: PredicateHost | None, **settings: Any) -> Memory:
    return Memory(store, MemorySettings(**settings), grammar="g", embedder=HashingEmbedder(), host=host)


def opened(memory: Memory, ask: Any = None, situation: Situation = SITUATION, episode: str = "e1") -> Guide:
    guide = memory.guide(episode, words)
    asyncio.run(guide.open(situation, ask))
    return guide


def regulate(
    guide: Guide, action: str, proposals: list[str | None], step: int = 0
) -> tuple[Regulation | None, list[str]]:
    feedback: list[str] = []

    async def resample(text: str) -> str | None:
        feedback.append(text)
        return proposals[len(feedback) - 1]

    run = guide.regulate(action, observation="A room.", step=step, admissible=None, resample=resample)
    return asyncio.run(run), feedback


def test_full_retrieves_instantiates_and_shows(store: Store, host: PredicateHost) -> None:
    use = opened(memory(store, host)).use
    assert use.mode == "full"
    assert use.snapshot == store.snapshot()
    assert {item.item for item in use.retrieved if item.level == 3} == {OPEN_FIRST.id, NO_DESK.id, BROKEN.id}
    assert all(item.score == pytest.approx(item.similarity + item.task_type + item.utility) for item in use.retrieved)
    became = {made.item: made for made in use.instantiations}
    assert became[OPEN_FIRST.id].text == "When you take from a box: open it first. Here: box 1."
    assert became[NO_DESK.id].reason == "learnt in tasks of type put"
    lines = use.text.splitlines()
    assert lines[0] == HEADER
    assert "- Rule (hypothesis): When you take from a box: open it first. Here: box 1." in lines
    assert "- Procedure: When a pen is in a box: open {0} -> take {1} from {0}." in lines
    assert lines[-1].startswith("- Earlier game: get a pen (success)")
    assert use.tokens == words(use.text)
    store.set_status(OPEN_FIRST.id, "validated", "test")
    assert "- Rule (validated): When you take" in opened(memory(store, host)).use.text


def test_another_grammar_and_removed_items_are_never_shown(store: Store, host: PredicateHost) -> None:
    other = Memory(store, MemorySettings(), grammar="h", embedder=HashingEmbedder(), host=host)
    guide = opened(other)
    assert (guide.use.text, guide.use.retrieved) == ("", ())
    store.set_status(PROCEDURE.id, "retired", "test")
    store.set_status(OPEN_FIRST.id, "rejected", "test")
    found = {item.item for item in opened(memory(store, host)).use.retrieved}
    assert not {PROCEDURE.id, OPEN_FIRST.id} & found
    assert BROKEN.id in found
    only = opened(memory(store, host, prompt_statuses=["validated"], block_statuses=["validated"])).use
    assert only.retrieved == ()


def test_the_budget_is_kept_and_what_was_left_out_is_recorded(store: Store, host: PredicateHost) -> None:
    whole = opened(memory(store, host)).use
    for budget in range(whole.tokens + 1):
        use = opened(memory(store, host, budget_tokens=budget)).use
        assert use.tokens <= budget
        assert len(use.instantiations) == len(use.retrieved)
    use = opened(memory(store, host, budget_tokens=whole.tokens - 1)).use
    assert use.instantiations[-1].reason == "over the token budget"
    assert opened(memory(store, host, budget_tokens=5)).use.text == ""


def test_direct_shows_principles_as_they_are(store: Store, host: PredicateHost) -> None:
    text = opened(memory(store, host, mode="direct")).use.text
    assert "- Rule (hypothesis): When you take from a box: open it first." in text
    assert "- Rule (hypothesis): When a desk is near: leave the desk alone." in text


def test_trajectory_shows_raw_trajectories_alone(store: Store) -> None:
    use = opened(memory(store, None, mode="trajectory")).use
    assert [item.level for item in use.retrieved] == [0, 0]
    assert use.text.startswith(
        f"{HEADER}\n- Earlier game: get a pen (solved)\n> open box 1\nDone.\n> take pen 1 from box 1"
    )
    assert "fetch a cup (not solved)" in use.text
    short = opened(memory(store, None, mode="trajectory", budget_tokens=45)).use
    assert "[…]" in short.text
    assert 30 < short.tokens <= 45
    assert all(made.text in short.text for made in short.instantiations)
    assert ledger_entries(use, [], "e", 1.0) == []  # trajectories have no ledger
    # The items rest on the first trajectory alone; what is shown raw counts too.
    assert store.provenance() == {("w", "t1")}
    assert memory(store, None, mode="trajectory").provenance == {("w", "t1"), ("w", "t2")}


def test_a_model_instantiates(store: Store, host: PredicateHost) -> None:
    asked: list[tuple[str, str]] = []

    async def ask(system: str, question: str) -> str:
        asked.append((system, question))
        if "open it first" in question:
            return "Constraint: open box 1 before you take the pen"
        if "leave the desk" in question:
            raise ValueError("too long")
        return "Hm."

    use = opened(memory(store, host, instantiation="policy"), ask).use
    became = {made.item: made for made in use.instantiations}
    assert len(asked) == 3
    assert "take precedence" in asked[0][0]
    assert became[OPEN_FIRST.id].text == "open box 1 before you take the pen"
    assert became[NO_DESK.id].reason == "the question does not fit: too long"
    assert became[BROKEN.id].reason == "unparsable answer: 'Hm.'"
    with pytest.raises(MemoryRecordError, match=r"needs memory\.builder\.model; name it"):
        memory(store, host, instantiation="builder")
    with pytest.raises(MemoryRecordError, match="needs a player that is a language model"):
        opened(memory(store, host, instantiation="policy"))


def test_what_the_builder_was_asked_for_is_told(store: Store, tmp_path: Path) -> None:
    """Three principles in two episodes of the same situation: the second is answered by the cache."""
    with ScriptedServer(lambda body: Reply('{"applies": true, "text": "be careful"}')) as server:
        prices = LanguageModelSettings(url=server.url, model="m", price_in=1.0, price_out=2.0)
        builder = LanguageModel(prices, tmp_path / "calls")
        settings = MemorySettings(instantiation="builder", attempts=0)
        shared = Memory(store, settings, grammar="g", embedder=HashingEmbedder(), host=None, builder=builder)
        opened(shared)
        before = shared.spend()
        opened(shared, episode="e2")
        after = shared.spend()
        builder.close()
    assert before == {  # 100 + 10 tokens a call, for 1 and 2 a million
        "builder_calls": 3, "builder_cached": 0, "builder_tokens_in": 300, "builder_tokens_out": 30,
        "builder_cost": 0.00036,
    }  # fmt: skip
    assert after == before | {"builder_cached": 3}
    assert spent_since(before, shared) == dict.fromkeys(before, 0) | {"builder_cached": 3}
    assert spend_line(before) == "3 calls paid, 0 from the cache; 300 + 30 tokens, cost 0.0004"
    assert memory(store, None, attempts=0).spend() == {}
    assert spent_since({}, None) == {}
    assert spend_line({"success": 1.0}) == ""


def test_equal_constraints_are_said_once(store: Store, host: PredicateHost) -> None:
    async def ask(system: str, question: str) -> str:
        return "Constraint: be careful"

    use = opened(memory(store, host, instantiation="policy"), ask).use
    assert use.text.count("be careful") == 1
    reasons = [made.reason for made in use.instantiations if made.suppressed]
    assert reasons == [f"says the same as {use.instantiations[0].item}"] * 2
    control = opened(memory(store, None, instantiation="policy", mode="shuffled"), ask).use
    assert [made.reason for made in control.instantiations if made.suppressed] == reasons
    assert control.tokens == use.tokens


def test_a_violation_is_resampled_with_the_principle_as_feedback(store: Store, host: PredicateHost) -> None:
    guide = opened(memory(store, host))
    regulation, feedback = regulate(guide, "take pen 1 from box 1", ["open box 1"])
    assert regulation is not None
    assert feedback == [f"{FEEDBACK}\n- When you take from a box: open it first. Here: box 1."]
    assert (regulation.choice, regulation.played) == ("resampled", 1)
    assert regulation.proposals == ("take pen 1 from box 1", "open box 1")
    checks = [(check.item, check.attempt, check.outcome) for check in regulation.checks]
    assert (OPEN_FIRST.id, 0, "violated") in checks
    assert (OPEN_FIRST.id, 1, "idle") in checks
    guide.played("open box 1", "It is open.", True)
    regulation, feedback = regulate(guide, "take pen 1 from box 1", [], step=1)
    assert regulation is not None
    assert (regulation.choice, feedback) == ("original", [])
    assert [check.outcome for check in regulation.checks if check.item == OPEN_FIRST.id] == ["followed"]


def test_after_three_resamples_the_original_is_played(store: Store, host: PredicateHost) -> None:
    again = "take cup 1 from box 2"
    regulation, feedback = regulate(opened(memory(store, host)), "take pen 1 from box 1", [again, None, again])
    assert regulation is not None
    assert (regulation.choice, regulation.played) == ("fallback", 0)
    assert regulation.proposals == ("take pen 1 from box 1", again, None, again)
    assert len(feedback) == 3
    assert [check.attempt for check in regulation.checks if check.outcome == "violated"] == [0, 1, 3]
    once, feedback = regulate(opened(memory(store, host, attempts=1)), "take pen 1 from box 1", [again])
    assert once is not None
    assert (once.choice, len(feedback)) == ("fallback", 1)


def test_only_audited_and_validated_predicates_block(store: Store, host: PredicateHost) -> None:
    store.set_status(OPEN_FIRST.id, "candidate", "test")
    regulation, feedback = regulate(opened(memory(store, host)), "take pen 1 from box 1", [])
    assert feedback == []
    assert regulation is not None
    assert OPEN_FIRST.id not in {check.item for check in regulation.checks}
    chosen = memory(store, host, block_statuses=["candidate"])
    assert regulate(opened(chosen), "take pen 1 from box 1", ["open box 1"])[1]
    store.set_status(OPEN_FIRST.id, "validated", "test")
    store.judge(OPEN_FIRST.id, "audit", {"decision": "failed"})
    assert regulate(opened(memory(store, host)), "take pen 1 from box 1", [])[1] == []
    assert regulate(opened(memory(store, None, attempts=0)), "take pen 1 from box 1", [])[0] is None
    with pytest.raises(MemoryRecordError, match=r"memory\.attempts: 3 in mode 'full' needs a PredicateHost"):
        memory(store, None)


def test_a_predicate_sees_what_the_agent_holds(store: Store, host: PredicateHost) -> None:
    full = PrincipleItem(
        **GRAMMAR,
        condition="you hold something",
        guidance="take nothing else",
        predicate=Predicate(trigger='action.verb == "take {0} from {1}"', requirement="size(inventory) == 0"),
    )
    (old,) = store.links(upper=OPEN_FIRST.id)
    cited = {"harmful": True, "evidence": [old.evidence[0].model_dump()]}
    assert store.write([full], [old.model_copy(update={"upper": full.id})], {full.id: cited}).rejected == []
    store.set_status(OPEN_FIRST.id, "retired", "test")
    store.set_status(full.id, "audited", "test")
    store.judge(full.id, "audit", {"decision": "passed"})
    guide = opened(memory(store, host, attempts=1))

    async def again(text: str) -> str | None:
        return None

    for inventory, outcome in ((["cup 1"], "violated"), ([], "followed"), (None, "followed")):
        checked = asyncio.run(
            guide.regulate(
                "take pen 1 from box 1",
                observation="A room.",
                step=0,
                admissible=None,
                inventory=inventory,
                resample=again,
            )
        )
        assert checked is not None
        assert next(check.outcome for check in checked.checks if check.item == full.id) == outcome


def test_no_predicate_blocks_once_breaking_it_is_judged_harmless(store: Store, host: PredicateHost) -> None:
    assert regulate(opened(memory(store, host)), "take pen 1 from box 1", ["open box 1"])[1]
    store.judge(OPEN_FIRST.id, "harm", {"harmful": False})
    regulation, feedback = regulate(opened(memory(store, host)), "take pen 1 from box 1", [])
    assert feedback == []
    assert regulation is not None
    assert OPEN_FIRST.id not in {check.item for check in regulation.checks}


def test_a_predicate_that_raises_is_switched_off_for_the_episode(store: Store, host: PredicateHost) -> None:
    guide = opened(memory(store, host))
    first, _ = regulate(guide, "go to desk 1", [])
    assert first is not None
    errors = [check for check in first.checks if check.outcome == "error"]
    assert [check.item for check in errors] == [BROKEN.id]
    assert errors[0].note
    second, _ = regulate(guide, "go to desk 1", [], step=1)
    assert second is not None
    assert [check.item for check in second.checks] == [OPEN_FIRST.id]


def test_the_control_says_as_much_in_another_order_and_objects_at_random(store: Store) -> None:
    store.judge(OPEN_FIRST.id, "audit", passed(0.25).record())
    store.judge(BROKEN.id, "audit", passed(0.0).record())
    control = memory(store, None, mode="shuffled")
    use = opened(control).use
    full = opened(memory(store, None, attempts=0)).use
    assert sorted(use.text.split()) == sorted(full.text.split())
    assert use.tokens == full.tokens
    assert "open it first" not in use.text
    assert [item.item for item in use.retrieved] == [item.item for item in full.retrieved]
    fired = 0
    for number in range(50):
        guide = opened(control, episode=f"e{number}")
        for step in range(8):
            # "go to desk 1" never violates the real predicate
            regulation, _ = regulate(guide, "go to desk 1", [None, None, None], step)
            assert regulation is not None
            fired += any(check.attempt == 0 and check.outcome == "violated" for check in regulation.checks)
    assert 70 <= fired <= 130  # 400 steps at 0.25: 100, standard deviation 8.7


def test_the_ledger_counts_what_happened_to_each_item(store: Store, host: PredicateHost) -> None:
    guide = opened(memory(store, host))
    regulations = []
    for step, (action, resampled) in enumerate(
        [("take pen 1 from box 1", ["open box 1"]), ("take pen 1 from box 1", []), ("go to desk 1", [])]
    ):
        regulation, _ = regulate(guide, action, list(resampled), step)
        assert regulation is not None
        regulations.append(regulation)
        guide.played(regulation.proposals[regulation.played] or "", "Done.", True)
    entries = {entry.item: entry for entry in ledger_entries(guide.use, regulations, "run:x/p/1", 1.0)}
    assert entries[OPEN_FIRST.id] == LedgerEntry(
        OPEN_FIRST.id, "run:x/p/1", 1.0, retrieved=1, instantiated=1, followed=1, violated=1
    )
    assert entries[NO_DESK.id] == LedgerEntry(NO_DESK.id, "run:x/p/1", 1.0, retrieved=1, suppressed=1)
    store.credit(list(entries.values()))
    assert store.ledger(OPEN_FIRST.id).outcome_with == 1.0
    assert store.ledger(NO_DESK.id).episodes_without == 0  # it did not apply: nothing is compared


@given(st.text(), st.text())
def test_shuffling_keeps_the_words(text: str, seed: str) -> None:
    shuffled = shuffle_words(text, seed, len)
    assert sorted(shuffled.split()) == sorted(text.split())
    if len(set(text.split())) > 1:
        assert shuffled.split() != text.split()


def test_settings_refuse_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="may not enter a prompt, so it can block nothing"):
        MemorySettings(prompt_statuses=["validated"])
    with pytest.raises(ValueError, match="a retired item is out of use"):
        MemorySettings(prompt_statuses=["audited", "validated", "retired"])


def arm(store: Store, host: PredicateHost, tried: str, **settings: Any) -> Memory:
    hidden = [OPEN_FIRST.id, BROKEN.id]
    made = MemorySettings(**settings)
    return Memory(store, made, grammar="g", embedder=HashingEmbedder(), host=host, hidden=hidden, tried=tried)


def test_an_arm_of_a_validation_shows_the_tried_principle_first_and_hides_the_others(
    store: Store, host: PredicateHost
) -> None:
    control = opened(arm(store, host, ""))
    assert [item.item for item in control.use.retrieved if item.level == 3] == [NO_DESK.id]
    treated = opened(arm(store, host, OPEN_FIRST.id))
    assert [item.item for item in treated.use.retrieved if item.level == 3] == [OPEN_FIRST.id, NO_DESK.id]
    assert regulate(treated, "take pen 1 from box 1", ["open box 1"])[0] is not None
    only = opened(arm(store, host, OPEN_FIRST.id, retrieval={"episodes": 0, "procedures": 0, "principles": 0}))
    assert [item.item for item in only.use.retrieved] == [OPEN_FIRST.id]


def test_the_tried_principle_is_shown_whatever_its_status_and_blocks_if_its_audit_passed(
    store: Store, host: PredicateHost
) -> None:
    settings: dict[str, Any] = {"prompt_statuses": ["validated"], "block_statuses": ["validated"]}
    shown = opened(arm(store, host, NO_DESK.id, **settings), situation=Situation("put it", "A desk 1.", "put"))
    assert shown.use.text == f"{HEADER}\n- Rule (hypothesis): When a desk is near: leave the desk alone. Here: desk 1."
    regulation, _ = regulate(opened(arm(store, host, OPEN_FIRST.id, **settings)), "take pen 1 from box 1", ["look"])
    assert regulation is not None
    assert regulation.choice == "resampled"
    store.judge(OPEN_FIRST.id, "audit", {"decision": "failed"})
    assert regulate(opened(arm(store, host, OPEN_FIRST.id, **settings)), "take pen 1 from box 1", [])[0] is None


def test_which_things_games_name_at_their_beginning(store: Store) -> None:
    # Both games open a bag and a box and a desk, which the first observation names; the pen, too. Of the cup only the
    # goal of the second one speaks.
    assert learn_words(store.trajectories())[1] == {"box": 1.0, "bag": 1.0, "desk": 1.0, "pen": 1.0, "cup": 0.5}
