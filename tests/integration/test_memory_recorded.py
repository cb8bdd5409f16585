"""The builder with a language model's recorded answers to its exact prompts for twenty real episodes."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from memory.audit_store import audit_store
from memory.build_report import BuildReport
from memory.predicates import PredicateHost
from memory.records import PrincipleItem, Trajectory
from memory.store import Store
from tests.recorded import ANSWERS, EPISODES, build_recorded, rollouts

pytestmark = pytest.mark.integration

needs_rollouts = pytest.mark.skipif(
    "SAGA_ROLLOUTS" not in os.environ, reason="SAGA_ROLLOUTS names no folder of real rollouts"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, BuildReport, int]]:
    """A store of all real episodes, built on twenty of them; and the number of prompts without a recorded answer."""
    folder = tmp_path_factory.mktemp("recorded")
    with Store(f"sqlite:///{folder}/memory.db") as store:
        store.add_trajectories(rollouts())
        report, missing = build_recorded(store, folder)
        yield store, report, len(missing)


def test_the_fixture_says_where_it_comes_from_and_quotes_little() -> None:
    data = json.loads(ANSWERS.read_text())
    assert data["origin"] == "written by a large language model from the exact prompts"
    assert Counter(row["stage"] for row in data["answers"])["episode"] == len(EPISODES)
    text = json.dumps(data)
    assert max(len(part.split('"')[0]) for part in text.split('"quote": "')[1:]) <= 80


@needs_rollouts
def test_every_prompt_is_one_that_was_answered_and_every_claim_stands(
    built: tuple[Store, BuildReport, int], capsys: pytest.CaptureFixture[str]
) -> None:
    store, report, missing = built
    assert missing == 0, "the prompts have changed: write the answers anew (tests/recorded.py says how)"
    assert report.spend["calls"] == len(json.loads(ANSWERS.read_text())["answers"])
    assert (report.refused, report.faults, report.stopped) == ([], [], "")
    assert store.rejections() == []
    assert report.written == {"episode": 20, "procedure": 6, "principle": 14, "predicate": 10}
    assert report.judged == {"harmful": 12, "harmless": 2, "no check possible": 2}
    with capsys.disabled():
        print("\n" + "\n".join(report.lines()))


@needs_rollouts
def test_principles_lead_down_to_the_steps_and_predicates_to_a_judgement(
    built: tuple[Store, BuildReport, int],
) -> None:
    store, _, _ = built
    told: set[str] = set()
    for stored in store.items(3):
        below = [link.lower for link in store.links(upper=stored.id)]
        assert below
        told |= {link.lower for lower in below for link in store.links(upper=lower)}
        if isinstance(stored.item, PrincipleItem) and stored.item.predicate:
            verdict = store.judgements(stored.id, "harm")[-1].verdict
            assert verdict["harmful"] is True
            assert verdict["evidence"]
    assert len(told) == 20  # every episode bears on some principle
    chosen: list[Trajectory] = rollouts()[:20]
    assert {task for _, task in store.provenance()} == {trajectory.task for trajectory in chosen}


@needs_rollouts
@pytest.mark.timeout(600)
def test_predicates_are_audited_on_all_real_episodes(
    built: tuple[Store, BuildReport, int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store, report, _ = built
    with PredicateHost() as host:
        audits = audit_store(store, host)
    assert len(audits) == report.written["predicate"]
    passed = [found for found in audits if found.status == "audited"]
    with capsys.disabled():
        print(f"\n{report.written['principle']} principles, {len(audits)} predicates, {len(passed)} passed the audit:")
        for found in audits:
            assert isinstance(found.stored.item, PrincipleItem)
            print(f"  {found.status}: {found.stored.item.guidance[:70]} ({found.audit.reason or 'all checks passed'})")
    # Measured: 7 of 10. The three others fire too rarely to tell, or the evidence is too thin.
    assert len(passed) >= 6
