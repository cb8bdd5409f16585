"""The store: what is written is read, claims without evidence are rejected, ledgers add up, snapshots name contents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memory.records import Evidence, KeyStep, Link, MemoryRecordError, Predicate, PrincipleItem, TraceStep, Trajectory
from memory.store import JSON, Ledger, LedgerEntry, Store
from tests.vault import PRINCIPLE, PROCEDURE, episode, hierarchy, link, trajectory

pytestmark = pytest.mark.unit


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(f"sqlite:///{tmp_path}/memory.db") as opened:
        yield opened


def test_trajectories_come_back_as_they_were_and_in_order(store: Store) -> None:
    first, second = trajectory(0), trajectory(1, task_type="close", round=3)
    assert store.add_trajectories([first, second, first]) == 2
    assert store.add_trajectories([second, trajectory(2)]) == 1
    assert store.trajectory(first.id) == first
    assert list(store.trajectories()) == [first, second, trajectory(2)]
    assert list(store.trajectories(task_type="close")) == [second]
    assert list(store.trajectories(since_round=3)) == [second]
    assert list(store.trajectories(world="elsewhere")) == []
    with pytest.raises(MemoryRecordError, match=r"trajectory: 't-0' is not in the memory"):
        store.trajectory("t-0")


def test_an_id_covers_what_the_agent_held_where_that_was_told() -> None:
    of = trajectory()
    assert of.id == "t-787c4561a69ebe5a"  # of the time before there was such a field
    held = of.steps[0].model_copy(update={"inventory": ("key",)})
    assert of.model_copy(update={"steps": (held, of.steps[1])}).id != of.id


def test_a_hierarchy_is_written_in_one_call_whatever_its_order(store: Store) -> None:
    of = trajectory()
    store.add_trajectories([of])
    items, links = hierarchy(of)
    report = store.write(items, links)
    assert (sorted(report.accepted), report.known, report.rejected) == (sorted(item.id for item in items), [], [])
    assert report.links == 3
    assert store.item(PRINCIPLE.id).item == PRINCIPLE
    assert [stored.item for stored in store.items(2)] == [PROCEDURE]
    assert store.item(PRINCIPLE.id).ledger == Ledger()
    assert store.links(upper=PRINCIPLE.id) == [links[0]]
    assert store.links(lower=of.id) == [links[2]]
    again = store.write(items, links)
    assert (again.accepted, again.rejected, again.links) == ([], [], 0)
    assert again.known == [item.id for item in items]


def test_the_ledger_adds_up(store: Store) -> None:
    of = trajectory()
    store.add_trajectories([of])
    store.write(*hierarchy(of))
    id = PRINCIPLE.id
    entries = [
        LedgerEntry(id, "e1", 1.0, retrieved=1, instantiated=1, followed=3, violated=1),
        LedgerEntry(id, "e2", 0.5, retrieved=1, instantiated=1),
        LedgerEntry(id, "e3", 0.25, retrieved=1, suppressed=1),
        LedgerEntry(id, "e4", None, retrieved=1, instantiated=1),
        LedgerEntry(id, "e6", 0.75),  # of a control
    ]
    expected = Ledger(
        retrieved=4, instantiated=3, suppressed=1, followed=3, violated=1,
        episodes_with=2, outcome_with=0.75, episodes_without=1, outcome_without=0.75,
    )  # fmt: skip
    store.credit(entries)
    assert store.ledger(id) == expected
    store.credit(entries[:2])  # again: changes nothing
    assert store.ledger(id) == expected
    store.credit([LedgerEntry(id, "e2", 0.0, retrieved=1, instantiated=1)])
    assert store.ledger(id).outcome_with == 0.5
    with pytest.raises(MemoryRecordError, match=r"outcome: 1.5 of episode e5"):
        store.credit([LedgerEntry(id, "e5", 1.5)])


def test_statuses_and_judgements_keep_their_history(store: Store) -> None:
    of = trajectory()
    store.add_trajectories([of])
    store.write(*hierarchy(of))
    store.set_status(PRINCIPLE.id, "audited", "direction 0.2 to 0.4", round=2)
    assert [(change.status, change.reason, change.round) for change in store.history(PRINCIPLE.id)] == [
        ("candidate", "built", 0),
        ("audited", "direction 0.2 to 0.4", 2),
    ]
    assert store.item(PRINCIPLE.id).status == "audited"
    assert store.items(3, statuses=["candidate"]) == []
    assert [stored.id for stored in store.items(3, statuses={"audited"})] == [PRINCIPLE.id]
    with pytest.raises(MemoryRecordError, match="only principles are judged"):
        store.set_status(PROCEDURE.id, "validated", "")
    store.judge(PRINCIPLE.id, "harm", {"harmful": False})
    store.judge(PRINCIPLE.id, "harm", {"harmful": True, "evidence": [1]}, round=2)
    assert [item.verdict for item in store.judgements(PRINCIPLE.id, "harm")] == [
        {"harmful": False},
        {"harmful": True, "evidence": [1]},
    ]


def test_a_snapshot_names_the_content(store: Store, tmp_path: Path) -> None:
    of = trajectory()
    empty = store.snapshot()
    store.add_trajectories([of])
    store.write(*hierarchy(of))
    full = store.snapshot("full")
    assert store.snapshot() == full != empty
    store.set_status(PRINCIPLE.id, "retired", "worn out")
    assert store.snapshot() != full
    store.set_status(PRINCIPLE.id, "candidate", "back")
    assert store.snapshot("back") == full
    other = Store(f"sqlite:///{tmp_path}/other.db")
    other.add_trajectories([trajectory()])
    items, links = hierarchy(of)
    other.write(items[1:], links[1:])
    other.write(items, links)
    assert other.snapshot() == full


def test_a_snapshot_tells_what_acts_and_not_how_often(store: Store) -> None:
    """The name, worked out by hand; it changes with decisions of audits and judgements of harm, and with nothing else
    that is recorded of an item."""
    of = trajectory()
    store.add_trajectories([of])
    items, links = hierarchy(of)
    store.write(items, links)

    def name(*decisions: str) -> str:
        parts = [[of.id], [one.id for one in links], [f"{item.id} candidate" for item in items], decisions]
        lines = "".join(line + "\n" for part in parts for line in sorted(part))
        return f"s-{hashlib.sha256(lines.encode()).hexdigest()[:16]}"

    plain = store.snapshot()
    assert plain == name()
    store.credit([LedgerEntry(PRINCIPLE.id, "e1", 1.0, retrieved=1, instantiated=1)])
    store.judge(PRINCIPLE.id, "validation", {"decision": "undecided"})
    assert store.snapshot() == plain
    store.judge(PRINCIPLE.id, "audit", {"decision": "passed", "steps": 10})
    passed = store.snapshot()
    assert passed == name(f'{PRINCIPLE.id} audit "passed"')
    store.judge(PRINCIPLE.id, "audit", {"decision": "passed", "steps": 20})
    assert store.snapshot() == passed
    store.judge(PRINCIPLE.id, "harm", {"harmful": True, "reason": "fails"})
    harmful = store.snapshot()
    assert harmful == name(f'{PRINCIPLE.id} audit "passed"', f"{PRINCIPLE.id} harm true")
    store.judge(PRINCIPLE.id, "audit", {"decision": "failed"})
    assert store.snapshot() == name(f'{PRINCIPLE.id} audit "failed"', f"{PRINCIPLE.id} harm true")
    store.judge(PRINCIPLE.id, "audit", {"decision": "passed"})
    assert store.snapshot() == harmful


CHECKED = PRINCIPLE.model_copy(update={"predicate": Predicate(trigger="true", requirement="step > 1")})
CLICK = {"trajectory": trajectory().id, "step": 0, "quote": "click"}


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (None, "predicate: comes without a judgement of harm"),
        ({"harmful": False, "evidence": [CLICK]}, "predicate: violating the principle is not judged harmful"),
        ({"harmful": "yes", "evidence": [CLICK]}, "predicate: violating the principle is not judged harmful"),
        ({"harmful": True}, "predicate: its judgement of harm cites no evidence"),
        ({"harmful": True, "evidence": []}, "predicate: its judgement of harm cites no evidence"),
        ({"harmful": True, "evidence": [CLICK, {"step": 0}]}, "harm.evidence[1].trajectory: Field required"),
        ({"harmful": True, "evidence": [CLICK | {"trajectory": "t-no"}]}, "harm.evidence[0].trajectory: 't-no' is not"),
        ({"harmful": True, "evidence": [CLICK | {"step": 9}]}, "harm.evidence[0].step: 9 is not in t-"),
        ({"harmful": True, "evidence": [CLICK | {"quote": "boom"}]}, "harm.evidence[0].quote: 'boom' does not occur"),
    ],
)
def test_a_predicate_needs_a_judgement_of_harm_that_holds(
    store: Store, harm: dict[str, JSON] | None, reason: str
) -> None:
    of = trajectory()
    store.add_trajectories([of])
    items, links = hierarchy(of)
    links = [*links[1:], link(PROCEDURE.id, CHECKED.id, of)]
    report = store.write([CHECKED, *items[1:]], links, {} if harm is None else {CHECKED.id: harm})
    assert [id for id, _ in report.rejected] == [CHECKED.id, links[-1].id]
    assert report.rejected[0][1].startswith(reason)
    assert store.items(3) == []


def test_what_is_harmful_to_violate_may_be_checked(store: Store) -> None:
    of = trajectory()
    store.add_trajectories([of])
    items, links = hierarchy(of)
    harm: dict[str, JSON] = {"harmful": True, "evidence": [CLICK]}
    links = [*links[1:], link(PROCEDURE.id, CHECKED.id, of)]
    assert store.write([CHECKED, *items[1:]], links, {CHECKED.id: harm}).rejected == []
    assert store.item(CHECKED.id).item == CHECKED
    assert [(one.verdict, one.round) for one in store.judgements(CHECKED.id, "harm")] == [(harm, 0)]
    store.write([CHECKED], [], {CHECKED.id: harm})  # it is known: nothing is recorded
    assert len(store.judgements(CHECKED.id)) == 1


def test_provenance_follows_links_and_evidence(store: Store) -> None:
    of, unused, cited = trajectory(0), trajectory(1), trajectory(2)
    store.add_trajectories([of, unused, cited])
    items, links = hierarchy(of)
    store.write(items, [*links, link(PROCEDURE.id, PRINCIPLE.id, cited, relation="contradicts")])
    assert store.provenance() == {("vault", "task-0"), ("vault", "task-2")}
    store.set_status(PRINCIPLE.id, "retired", "")
    assert store.provenance() == {("vault", "task-0")}
    for id in (PROCEDURE.id, episode(of).id):
        store.set_status(id, "retired", "")
    assert store.provenance() == set()


OTHER = PrincipleItem(world="vault", grammar="v1", condition="it is dark", guidance="strike a match")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"evidence": ()}, "evidence: empty"),
        ({"upper": "r-unknown"}, "upper: 'r-unknown' is not in the memory"),
        ({"lower": "p-unknown"}, "lower: 'p-unknown' is not in the memory"),
        ({"lower": trajectory().id}, "is not one level above"),
        ({"evidence": (Evidence(trajectory="t-no", step=0),)}, "evidence[0].trajectory: 't-no' is not in the memory"),
        ({"evidence": (Evidence(trajectory=trajectory().id, step=2),)}, "evidence[0].step: 2 is not in t-"),
        (
            {"evidence": (Evidence(trajectory=trajectory().id, step=0, quote="the door is open"),)},
            "evidence[0].quote: 'the door is open' does not occur in step 0",
        ),
        (
            {
                "evidence": (
                    Evidence(trajectory=trajectory().id, step=0, quote="CLICK."),
                    Evidence(trajectory=trajectory().id, step=1, quote="enter the door"),
                )
            },
            "evidence[1].quote: 'enter the door'",
        ),
    ],
)
def test_a_link_without_its_evidence_is_rejected_and_counted(
    store: Store, changed: dict[str, object], reason: str
) -> None:
    of = trajectory()
    store.add_trajectories([of])
    store.write(*hierarchy(of))
    bad = link(PROCEDURE.id, PRINCIPLE.id, of, quote="pull lever", relation="contradicts").model_copy(update=changed)
    for _ in range(2):
        report = store.write([], [bad])
        assert (report.links, len(report.rejected)) == (0, 1)
        assert reason in report.rejected[0][1]
    (kept,) = store.rejections()
    assert (kept.id, kept.kind, kept.times) == (bad.id, "link", 2)
    assert Link.model_validate(kept.record) == bad
    assert store.stats().rejected == {("link", kept.field): 2}


def test_an_item_needs_support_that_holds(store: Store) -> None:
    of = trajectory()
    store.add_trajectories([of])
    store.write(*hierarchy(of))
    unsupported = store.write([OTHER], [])
    assert unsupported.rejected == [
        (OTHER.id, "links: none that holds supports it from the procedure level; cite what does")
    ]
    contradicted = store.write([OTHER], [link(PROCEDURE.id, OTHER.id, of, relation="contradicts")])
    assert contradicted.rejected[0][0] == OTHER.id
    assert store.links(upper=OTHER.id) == []
    half = [link(PROCEDURE.id, OTHER.id, of, quote="no such words"), link(PROCEDURE.id, OTHER.id, of)]
    report = store.write([OTHER], half)
    assert (report.accepted, report.links) == ([OTHER.id], 1)
    assert store.links(upper=OTHER.id) == half[1:]


def test_a_rejected_item_takes_what_rests_on_it_along(store: Store) -> None:
    of = trajectory()
    store.add_trajectories([of])
    items, links = hierarchy(of)
    told = episode(of, key_steps=(KeyStep(step=7, what="never happened"),))
    links = [links[0], link(told.id, PROCEDURE.id, of), link(of.id, told.id, of)]
    report = store.write([*items[:2], told], links)
    assert (report.accepted, report.links) == ([], 0)
    reasons = dict(report.rejected)
    assert reasons[told.id] == f"key_steps[0].step: 7 is not in {of.id}; cite one that is"
    assert "none that holds" in reasons[PROCEDURE.id]
    assert "none that holds" in reasons[PRINCIPLE.id]
    assert len(reasons) == 6
    assert store.stats().items == {1: {}, 2: {}, 3: {}}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"outcome": "failure"}, "outcome: 'failure', but the trajectory ended in success"),
        ({"grammar": "v2"}, "is of vault/v1, the record above of vault/v2"),
        ({"trajectory": "t-none"}, "trajectory: 't-none' is not in the memory"),
    ],
)
def test_an_episode_must_agree_with_its_trajectory(store: Store, changes: dict[str, object], reason: str) -> None:
    of = trajectory()
    store.add_trajectories([of])
    told = episode(of, **changes)
    report = store.write([told], [link(of.id, told.id, of)])
    assert reason in dict(report.rejected)[told.id]


def test_a_rule_is_not_built_across_grammars(store: Store) -> None:
    of, old = trajectory(0), trajectory(1, grammar="v0")
    store.add_trajectories([of, old])
    store.write(*hierarchy(of))
    report = store.write([], [link(PROCEDURE.id, PRINCIPLE.id, old)])
    assert "is of vault/v0, the record above of vault/v1" in report.rejected[0][1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": float("nan")}, r"score: nan \(file#0\); give a finite number"),
        ({"task": "a\0b"}, r"task: 'a\\x00b' holds a NUL"),
        (
            {"steps": (TraceStep(index=1, observation=""), TraceStep(index=1, observation=""))},
            r"steps\[1\].index: 1 after 1",
        ),
        ({"steps": (TraceStep(index=0, observation="", reward=float("inf")),)}, r"steps\[0\].reward: inf"),
    ],
)
def test_what_memory_cannot_take_is_one_error(store: Store, changes: dict[str, object], message: str) -> None:
    with pytest.raises(MemoryRecordError, match=message):
        store.add_trajectories([trajectory(**changes)])
    assert list(store.trajectories()) == []


def test_unknown_ids_are_named(store: Store) -> None:
    for call in (
        lambda: store.item("r-1"),
        lambda: store.ledger("r-1"),
        lambda: store.set_status("r-1", "retired", ""),
        lambda: store.credit([LedgerEntry("r-1", "e", 1.0)]),
        lambda: store.judge("r-1", "audit", {}),
    ):
        with pytest.raises(MemoryRecordError, match="item: 'r-1' is not in the memory"):
            call()


def test_free_text_of_a_model_is_stored_whatever_it_holds(store: Store) -> None:
    of = trajectory()
    store.add_trajectories([of])
    store.write(*hierarchy(of))
    store.set_status(PRINCIPLE.id, "rejected", "bad \0 and \ud800")
    assert store.item(PRINCIPLE.id).reason == "bad \ufffd and ?"
    store.judge(PRINCIPLE.id, "audit", {"why": "\ud800\0"})
    assert store.judgements(PRINCIPLE.id)[0].verdict == {"why": "?\0"}
    with pytest.raises(MemoryRecordError, match="verdict"):
        store.judge(PRINCIPLE.id, "audit", {"rate": float("nan")})


def test_more_records_than_one_batch(store: Store) -> None:
    many = [trajectory(number) for number in range(1203)]
    assert store.add_trajectories(iter(many)) == 1203
    assert [record.task for record in store.trajectories()] == [f"task-{number}" for number in range(1203)]
    told = [episode(of) for of in many]
    report = store.write(told, [link(of.id, item.id, of) for of, item in zip(many, told, strict=True)])
    assert (len(report.accepted), report.links, report.rejected) == (1203, 1203, [])
    assert len(store.find([of.id for of in many])) == 1203
    stats = store.stats()
    (world,) = stats.trajectories
    assert (world.trajectories, world.steps, world.succeeded, world.statuses) == (1203, 2406, 1203, {"complete": 1203})
    assert stats.items == {1: {"candidate": 1203}, 2: {}, 3: {}}


def test_threads_may_share_a_store(store: Store) -> None:
    of = trajectory()
    store.add_trajectories([of])
    store.write(*hierarchy(of))

    def one(number: int) -> int:
        store.add_trajectories([trajectory(number)])
        store.credit([LedgerEntry(PRINCIPLE.id, f"e{number}", 1.0, instantiated=1)])
        return len(store.items(3))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(1, 41))) == [1] * 40
    assert store.ledger(PRINCIPLE.id).episodes_with == 40
    assert store.counts()[0] == 41


def test_a_generator_of_trajectories_that_fails_loses_nothing_before_it(store: Store) -> None:
    def some() -> Iterator[Trajectory]:
        yield from (trajectory(number) for number in range(600))
        raise RuntimeError("the file ends here")

    with pytest.raises(RuntimeError):
        store.add_trajectories(some())
    assert store.counts()[0] == 500  # the full batch before it
    assert store.add_trajectories(trajectory(number) for number in range(600)) == 100
