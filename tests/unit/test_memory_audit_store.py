"""The audit of a whole memory: judgements and statuses in the store, and the table of ``saga memory audit``."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from memory.audit_store import audit_store
from memory.predicates import PredicateHost
from memory.records import EpisodeItem, Evidence, Link, PrincipleItem, ProcedureItem
from memory.store import Store
from tests.unit.audit_world import episode, principle
from train.cli import app

pytestmark = pytest.mark.unit

PUT, OPENED = "action.text == 'put key in chest'", "history.exists(h, h.action == 'open chest')"
RULES = {
    "good": principle(PUT, OPENED),
    "inverted": principle(PUT, f"!{OPENED}"),
    "late": principle("true", "step <= 30"),
    "unseen": principle(PUT, OPENED, task_type="b"),
    "words": principle("true", "true").model_copy(update={"predicate": None}),
}


def harm(evidence: tuple[Evidence, ...]) -> dict[str, Any]:
    """The verdict without which no predicate is taken."""
    return {"harmful": True, "evidence": [one.model_dump() for one in evidence]}


def fill(url: str) -> dict[str, str]:
    """A store with made-up trajectories, and the rules resting on the first success; returns the rules' ids."""
    trajectories = [episode(seed) for seed in range(120)]
    first = next(trajectory for trajectory in trajectories if trajectory.success)
    evidence = (Evidence(trajectory=first.id, step=0, quote="A room."),)
    low = EpisodeItem(world="w", grammar="g", trajectory=first.id, goal="x", outcome="success")
    middle = ProcedureItem(world="w", grammar="g", when="x", steps=("search {0}",))
    rules = [rule.model_copy(update={"condition": name}) for name, rule in RULES.items()]
    links = [
        Link(lower=first.id, upper=low.id, evidence=evidence),
        Link(lower=low.id, upper=middle.id, evidence=evidence),
        *(Link(lower=middle.id, upper=rule.id, evidence=evidence) for rule in rules),
    ]
    with Store(url) as store:
        store.add_trajectories(trajectories)
        report = store.write([low, middle, *rules], links, {rule.id: harm(evidence) for rule in rules})
    assert not report.rejected
    return {rule.condition: rule.id for rule in rules}


def test_verdicts_and_statuses_are_written(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/memory.db"
    ids = fill(url)
    with Store(url) as store, PredicateHost() as host:
        audited = audit_store(store, host, round=2)
        assert {row.stored.id for row in audited} == {id for name, id in ids.items() if name != "words"}
        assert {name: store.item(id).status for name, id in ids.items()} == {
            "good": "audited",
            "inverted": "rejected",
            "late": "rejected",
            "unseen": "candidate",
            "words": "candidate",
        }
        assert store.item(ids["late"]).reason.startswith("audit: risk_set: ")
        [judgement] = store.judgements(ids["good"], "audit")
        checks = {check["name"]: check for check in judgement.verdict["checks"]}  # type: ignore[index,union-attr]
        assert checks["trigger_rate"]["n"] == sum(len(episode(seed).steps) for seed in range(120))
        assert judgement.round == 2
        newest = {
            name: [judged.verdict["decision"] for judged in store.judgements(id, "audit")] for name, id in ids.items()
        }
        assert newest == {
            "good": ["passed"],
            "inverted": ["failed"],
            "late": ["failed"],
            "unseen": ["open"],
            "words": [],
        }
        # What is validated keeps its status, whatever its predicate is worth.
        store.set_status(ids["unseen"], "validated", "by hand")
        assert [row.status for row in audit_store(store, host, round=3)] == ["audited", "validated"]
        assert audit_store(store, host, grammar="another") == []


def test_the_command_prints_every_predicate_within_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "memory.db"
    ids = fill(f"sqlite:///{path}")
    printed = CliRunner().invoke(app, ["memory", "audit", "--store", str(path)])
    assert printed.exit_code == 0, printed.output
    rows = printed.output.splitlines()
    for name in ("good", "inverted", "late", "unseen"):
        figures, verdict = (row for row in rows if ids[name][:8] in row)
        assert len(figures) <= 80
        assert "…" not in figures
        assert verdict.startswith(f"{ids[name]} ")
    assert f"{ids['good']} audited: passed on" in printed.output
    assert (
        f"{ids['late']} rejected: risk_set: 0 violating and 0 following episodes compare; way_out: at 100 of 100"
        in printed.output
    )
    assert "no principle" in CliRunner().invoke(app, ["memory", "audit", "--store", str(path), "--world", "x"]).output


def test_a_principle_without_any_trajectory_of_known_outcome_stays_open(tmp_path: Path) -> None:
    rule = RULES["good"]
    assert isinstance(rule, PrincipleItem)
    url = f"sqlite:///{tmp_path}/memory.db"
    unknown = episode(0).model_copy(update={"success": None})
    evidence = (Evidence(trajectory=unknown.id, step=0),)
    low = EpisodeItem(world="w", grammar="g", trajectory=unknown.id, goal="x", outcome="unknown")
    middle = ProcedureItem(world="w", grammar="g", when="x", steps=("search {0}",))
    with Store(url) as store, PredicateHost(workers=1) as host:
        store.add_trajectories([unknown])
        links = [
            Link(lower=unknown.id, upper=low.id, evidence=evidence),
            Link(lower=low.id, upper=middle.id, evidence=evidence),
            Link(lower=middle.id, upper=rule.id, evidence=evidence),
        ]
        assert not store.write([low, middle, rule], links, {rule.id: harm(evidence)}).rejected
        [row] = audit_store(store, host)
        assert (row.audit.decision, row.status) == ("open", "candidate")
        assert row.audit.reason == "no trajectory of known outcome"
