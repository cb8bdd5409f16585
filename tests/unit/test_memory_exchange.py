"""Export and import: what is in a memory comes back, byte for byte; what was changed, cut or invented is refused."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memory.exchange import export_memory, import_memory
from memory.records import (
    EpisodeItem,
    Evidence,
    Link,
    MemoryRecordError,
    Predicate,
    ProcedureItem,
    TraceStep,
    Trajectory,
)
from memory.store import LedgerEntry, Store
from tests.vault import PRINCIPLE, PROCEDURE, episode, hierarchy, link, trajectory

pytestmark = pytest.mark.unit


def open_store(folder: Path, name: str) -> Store:
    return Store(f"sqlite:///{folder}/{name}.db")


def filled(folder: Path, name: str = "first") -> Store:
    """A memory with something of everything, and two snapshots on the way."""
    store = open_store(folder, name)
    of, later = trajectory(0, note="of a kind"), trajectory(1, round=2)
    store.add_trajectories([of])
    store.write(*hierarchy(of))
    store.snapshot("round 1")
    store.set_status(PRINCIPLE.id, "audited", "direction 0.1 to 0.3", round=1)
    store.add_trajectories([later])
    told = episode(later)
    store.write([told], [link(later.id, told.id, later), link(told.id, PROCEDURE.id, later)])
    store.judge(PRINCIPLE.id, "harm", {"harmful": False}, round=1)
    store.snapshot("round 2")
    store.set_status(PRINCIPLE.id, "validated", "helped", round=2)
    store.write([], [link(PROCEDURE.id, PRINCIPLE.id, of, quote="nowhere")])
    store.credit([LedgerEntry(PRINCIPLE.id, f"e{n}", n / 7, retrieved=1, instantiated=n % 2) for n in range(7)])
    store.credit([LedgerEntry(PRINCIPLE.id, "e3", 0.9, retrieved=1)])
    store.judge(PRINCIPLE.id, "audit", {"direction": [0.1, 0.3], "passed": True, "note": "ä\0"}, round=1)
    return store


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_everything_comes_back(tmp_path: Path) -> None:
    first, second = filled(tmp_path), open_store(tmp_path, "second")
    counts = export_memory(first, tmp_path / "a.jsonl")
    assert counts == {
        "trajectory": 2, "episode": 2, "procedure": 1, "principle": 1, "status": 6, "link": 5, "snapshot": 2,
        "credit": 7, "judgement": 2, "rejection": 1,
    }  # fmt: skip
    added = import_memory(second, tmp_path / "a.jsonl")
    assert added == {kind: count for kind, count in counts.items() if kind != "status"}
    export_memory(second, tmp_path / "b.jsonl")
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes()
    assert list(second.trajectories()) == list(first.trajectories())
    for level in (1, 2, 3):
        assert second.items(level) == first.items(level)
    assert second.history(PRINCIPLE.id) == first.history(PRINCIPLE.id)
    assert second.judgements(PRINCIPLE.id) == first.judgements(PRINCIPLE.id)
    assert second.entries(PRINCIPLE.id) == first.entries(PRINCIPLE.id)
    assert second.snapshots() == first.snapshots()
    assert second.rejections() == first.rejections()
    assert second.snapshot() == first.snapshot()


def test_gz_is_compressed_and_equal_memories_make_equal_files(tmp_path: Path) -> None:
    store = filled(tmp_path)
    export_memory(store, tmp_path / "a.jsonl")
    export_memory(store, tmp_path / "a.jsonl.gz")
    export_memory(store, tmp_path / "b.jsonl.gz")
    assert gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes()) == (tmp_path / "a.jsonl").read_bytes()
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    second = open_store(tmp_path, "second")
    import_memory(second, tmp_path / "b.jsonl.gz")
    assert second.snapshot() == store.snapshot()
    with pytest.raises(MemoryRecordError, match="exists; name another file"):
        export_memory(store, tmp_path / "a.jsonl")


def test_an_import_into_a_memory_adds_what_is_new(tmp_path: Path) -> None:
    first = filled(tmp_path)
    export_memory(first, tmp_path / "a.jsonl")
    before = first.items(3)
    assert not any(count for kind, count in import_memory(first, tmp_path / "a.jsonl").items() if kind != "credit")
    assert first.items(3) == before
    assert len(first.history(PRINCIPLE.id)) == 3

    other = open_store(tmp_path, "other")
    of = trajectory(0)
    other.add_trajectories([of, trajectory(5)])
    other.write(*hierarchy(of))
    other.set_status(PRINCIPLE.id, "rejected", "failed here")
    added = import_memory(other, tmp_path / "a.jsonl")
    assert (added["trajectory"], added["episode"], added.get("principle", 0), added["link"]) == (1, 1, 0, 2)
    assert (added.get("snapshot", 0), added.get("judgement", 0)) == (0, 0)
    kept = other.item(PRINCIPLE.id)
    assert (kept.status, kept.reason) == ("rejected", "failed here")
    assert kept.ledger == first.ledger(PRINCIPLE.id)


def change(index: int, edit: Callable[[dict[str, Any]], object]) -> Callable[[list[dict[str, Any]]], None]:
    return lambda read: edit(read[index]) and None


def of_kind(kind: str, edit: Callable[[dict[str, Any]], object]) -> Callable[[list[dict[str, Any]]], None]:
    return lambda read: edit(next(line for line in read if line["kind"] == kind)) and None


def without(kind: str, which: Callable[[dict[str, Any]], bool] = lambda line: True) -> Callable[[list[Any]], None]:
    def edit(read: list[Any]) -> None:
        read[:] = [line for line in read if line["kind"] != kind or not which(line)]
        read[-1]["lines"] = len(read) - 1

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda read: read.pop(), "without its end line: it was cut"),
        (lambda read: read.pop(3), r":4: kind: .*, but e-.* above has no status"),
        (lambda read: read.append(read[1]), "after the end line"),
        (lambda read: read.pop(0), "only it, is the first line"),
        (change(0, lambda line: line.update(version=1)), r":1: version: 1; this version reads 2"),
        (change(0, lambda line: line.update(format="other")), "'saga-memory'"),
        (of_kind("trajectory", lambda line: line["record"].update(goal="x")), r":2: id: 't-.*it was changed"),
        (of_kind("trajectory", lambda line: line.update(extra=1)), "trajectory.extra: Extra inputs"),
        (of_kind("principle", lambda line: line["record"].update(guidance="x")), "id: 'r-.*it was changed"),
        (of_kind("status", lambda line: line["change"].update(status="sound")), "status.change.status"),
        (of_kind("status", lambda line: line["change"].update(status="validated")), "only principles are judged"),
        (of_kind("link", lambda line: line["record"]["evidence"][0].update(quote="x")), "id: 'l-.*it was changed"),
        (of_kind("credit", lambda line: line["entry"].update(outcome=2)), "outcome: 2.0 of episode e0"),
        (of_kind("credit", lambda line: line["entry"].update(item="r-no")), "item: 'r-no' is not in the memory"),
        (without("trajectory", lambda line: line["record"]["round"] == 0), "trajectory: 't-.* is not in the memory"),
        (without("link", lambda line: line["record"]["upper"] == PRINCIPLE.id), r"snapshot: s-.*, but the content"),
    ],
)
def test_a_changed_file_is_refused_as_a_whole(
    tmp_path: Path, edit: Callable[[list[dict[str, Any]]], None], message: str
) -> None:
    path = tmp_path / "a.jsonl"
    export_memory(filled(tmp_path), path)
    read = lines(path)
    edit(read)
    path.write_text("".join(json.dumps(line) + "\n" for line in read))
    second = open_store(tmp_path, "second")
    empty = second.snapshot()
    with pytest.raises(MemoryRecordError, match=message) as raised:
        import_memory(second, path)
    assert str(raised.value).startswith(f"{path}:")
    assert second.snapshot() == empty
    assert second.rejections() == []


def test_an_invented_rule_needs_evidence_like_any_other(tmp_path: Path) -> None:
    """The ids of a forged file may be right: what the evidence says is checked again."""
    path = tmp_path / "a.jsonl"
    export_memory(filled(tmp_path), path)
    read = [line for line in lines(path) if line["kind"] not in ("snapshot", "credit", "judgement", "rejection")]
    forged = link(PROCEDURE.id, PRINCIPLE.id, trajectory(1, round=2), quote="the vault is on fire")
    read.insert(-1, {"kind": "link", "id": forged.id, "record": forged.model_dump(mode="json")})
    read[-1]["lines"] = len(read) - 1
    path.write_text("".join(json.dumps(line) + "\n" for line in read))
    with pytest.raises(MemoryRecordError, match=r"quote: 'the vault is on fire' does not occur in step 0"):
        import_memory(open_store(tmp_path, "second"), path)
    read.pop(-2)
    alone = PRINCIPLE.model_copy(update={"guidance": "do as I say"})
    status = next(line for line in read if line["kind"] == "status")
    read[-1:-1] = [
        {"kind": "principle", "id": alone.id, "record": alone.model_dump(mode="json")},
        {**status, "item": alone.id},
    ]
    read[-1]["lines"] = len(read) - 1
    path.write_text("".join(json.dumps(line) + "\n" for line in read))
    with pytest.raises(MemoryRecordError, match=f"none in the file supports {alone.id}"):
        import_memory(open_store(tmp_path, "third"), path)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (None, "predicate: comes without a judgement of harm"),
        ({"harmful": False}, "predicate: violating the principle is not judged harmful"),
        (
            {"harmful": True, "evidence": [{"trajectory": "T", "step": 0, "quote": "fire"}]},
            "quote: 'fire' does not",
        ),
    ],
)
def test_an_invented_predicate_needs_a_judgement_of_harm(
    tmp_path: Path, told: dict[str, Any] | None, message: str
) -> None:
    first, of = open_store(tmp_path, "first"), trajectory()
    first.add_trajectories([of])
    items, links = hierarchy(of)
    checked = PRINCIPLE.model_copy(update={"predicate": Predicate(trigger="true", requirement="step > 1")})
    harm = {"harmful": True, "evidence": [{"trajectory": of.id, "step": 0, "quote": "click"}]}
    links = [*links[1:], link(PROCEDURE.id, checked.id, of)]
    assert first.write([checked, *items[1:]], links, {checked.id: harm}).rejected == []
    path = tmp_path / "a.jsonl"
    export_memory(first, path)
    second = open_store(tmp_path, "second")
    assert import_memory(second, path)["judgement"] == 1
    assert second.judgements(checked.id) == first.judgements(checked.id)
    read = lines(path)
    place = next(number for number, line in enumerate(read) if line["kind"] == "judgement")
    if told is None:
        del read[place]
        read[-1]["lines"] -= 1
    else:
        for cited in told.get("evidence", []):
            cited["trajectory"] = of.id
        read[place]["judgement"]["verdict"] = told
    path.write_text("".join(json.dumps(line) + "\n" for line in read))
    third = open_store(tmp_path, "third")
    with pytest.raises(MemoryRecordError, match=f"{checked.id}: .*{message}"):
        import_memory(third, path)
    assert third.items(3) == []


@pytest.mark.parametrize(
    "data", [b"", b"hello\n", b"{}\n", b'{"kind": "header"}\n', b"\xff\xfe\n", b"[" * 100_000 + b"\n"]
)
def test_a_file_of_another_kind_is_one_error(tmp_path: Path, data: bytes) -> None:
    for name, content in (("a.jsonl", data), ("a.jsonl.gz", gzip.compress(data)), ("b.jsonl.gz", data)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(MemoryRecordError) as raised:
            import_memory(open_store(tmp_path, "x"), tmp_path / name)
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 1000
    with pytest.raises(MemoryRecordError, match="No such file"):
        import_memory(open_store(tmp_path, "x"), tmp_path / "none.jsonl")


# ---- whatever text and numbers the records hold

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)
numbers = st.floats(allow_nan=False, allow_infinity=False)
steps = st.lists(
    st.builds(
        TraceStep,
        index=st.just(0),
        observation=texts,
        thought=texts,
        action=st.none() | texts,
        result=texts,
        valid=st.none() | st.booleans(),
        reward=numbers,
        admissible=st.none() | st.lists(texts, max_size=2).map(tuple),
    ),
    min_size=1,
    max_size=3,
).map(lambda found: tuple(step.model_copy(update={"index": number}) for number, step in enumerate(found)))
trajectories = st.builds(
    Trajectory,
    source=names,
    world=st.just("w"),
    grammar=st.just("g"),
    task=names,
    task_type=names,
    goal=texts,
    agent=texts,
    success=st.none() | st.booleans(),
    score=numbers,
    status=st.sampled_from(["complete", "truncated", "odd"]),
    note=texts,
    round=st.integers(0, 9),
    steps=steps,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(found=st.lists(trajectories, min_size=1, max_size=4), when=texts, outcomes=st.lists(st.floats(0, 1), max_size=5))
def test_any_memory_comes_back(found: list[Trajectory], when: str, outcomes: list[float]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with open_store(folder, "first") as first, open_store(folder, "second") as second:
            distinct = {record.id: record for record in found}
            assert first.add_trajectories(found) == len(distinct)
            assert list(first.trajectories()) == list(distinct.values())
            procedure = ProcedureItem(world="w", grammar="g", when=when, steps=(when,))
            told = [
                EpisodeItem(world="w", grammar="g", trajectory=id, goal=record.goal, outcome="unknown")
                for id, record in distinct.items()
            ]
            joins = []
            for item, record in zip(told, distinct.values(), strict=True):
                last = record.steps[-1]
                cited = (
                    Evidence(trajectory=item.trajectory, step=last.index, quote=f" {last.result}\n"),
                    Evidence(trajectory=item.trajectory, step=0, quote=record.steps[0].observation),
                )
                joins += [
                    Link(lower=item.trajectory, upper=item.id, evidence=cited),
                    Link(lower=item.id, upper=procedure.id, evidence=cited),
                ]
            report = first.write([*told, procedure], joins)
            assert report.rejected == []
            first.credit(
                [LedgerEntry(procedure.id, f"e{n}", outcome, instantiated=n % 2) for n, outcome in enumerate(outcomes)]
            )
            first.snapshot(when)
            export_memory(first, folder / "a.jsonl")
            import_memory(second, folder / "a.jsonl")
            export_memory(second, folder / "b.jsonl")
            assert (folder / "b.jsonl").read_bytes() == (folder / "a.jsonl").read_bytes()
            assert list(second.trajectories()) == list(distinct.values())
            assert second.items(1) == first.items(1)
            assert second.items(2) == first.items(2)
            assert second.snapshot() == first.snapshot()
