"""The language-model builder against a scripted server: its stages, operations, and answers that are wrong."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memory.build_prompts import Attempt, beside, contrast, cut, episode_material, instructions
from memory.build_report import BuildReport
from memory.builder import LanguageModelBuilder
from memory.builder_settings import BuilderSettings
from memory.language_model import LanguageModel
from memory.records import EpisodeItem, MemoryRecordError, PrincipleItem, ProcedureItem, TraceStep, Trajectory
from memory.store import Store
from tests.scripted_server import Reply, ScriptedServer

pytestmark = pytest.mark.unit


def trajectory(number: int, success: bool) -> Trajectory:
    """Put a lamp into a box; the failed ones forget to open it."""
    told = [("go to box 1", "The box 1 is closed.", True)]
    if success:
        told.append(("open box 1", "You open the box 1.", True))
        told.append((f"put lamp {number} in box 1", f"The lamp {number} is in the box 1.", True))
    else:
        told += [(f"put lamp {number} in box 1", "Nothing happens.", False)] * 3
    observation = f"A room with a box 1. You hold the lamp {number}."
    steps = []
    for index, (action, result, valid) in enumerate(told):
        steps.append(TraceStep(index=index, observation=observation, action=action, result=result, valid=valid))
        observation = result
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


TRAJECTORIES = [trajectory(number, number % 2 == 0) for number in range(8)]


def kind(body: dict[str, Any]) -> str:
    """Which stage asks; from the instructions, for the schema is not sent in every form."""
    system = body["messages"][0]["content"]
    return next(
        n for n in ("episode", "procedures", "principles", "harm", "predicate") if system == instructions(n).text
    )


def material(body: dict[str, Any]) -> str:
    return str(body["messages"][1]["content"])


def able(body: dict[str, Any]) -> dict[str, Any]:
    """What a good model answers: it reads steps and quotes from the material."""
    stage, text = kind(body), material(body)
    if stage == "episode":
        steps = re.findall(r"^\[(\d+)\]\n +(?:thought.*\n +)?action: (.*)\n +answer( \(refused\))?: (.*)$", text, re.M)
        claims = [{"step": int(n), "what": f"did {action}", "quote": answer} for n, action, _, answer in steps]
        refused = [{"step": int(n), "what": "refused", "quote": action} for n, action, mark, _ in steps if mark]
        return {"goal": "put it", "key_steps": claims[-3:], "obstacles": refused[:1]}
    shown = re.findall(
        r"^\[(E\d+)\] (success|failure).*\n(?:  .*\n)*?  actions -> answers:\n((?:  .*\n?)*)", text, re.M
    )
    cited = {}
    for alias, outcome, rows in shown:
        row = re.findall(r"^  (\d+): (.*) -> ", rows, re.M)[1]
        cited[alias] = (outcome, {"episode": alias, "step": int(row[0]), "quote": row[1]})
    evidence = [citation for _, citation in cited.values()]
    if stage == "procedures":
        if "[P1]" in text:
            return {"operations": [operation(targets=["P1"], operation="merge", evidence=evidence)]}
        steps = ["go to {1}", "open {1}", "put {0} in {1}"]
        return {
            "operations": [
                operation(when="put into a closed thing", steps=steps, pitfalls=["closed"], evidence=evidence)
            ]
        }
    if stage == "principles":
        if "[R1]" in text:
            return {"operations": [principle(targets=["R1"], operation="merge", procedures=["P1"], evidence=evidence)]}
        added = principle(condition="the box is closed", guidance="open it first", procedures=["P1"], evidence=evidence)
        return {"operations": [added]}
    failed = [citation for outcome, citation in cited.values() if outcome == "failure"]
    if stage == "harm":
        return {"why": "It is refused.", "evidence": failed, "harmful": bool(failed)}
    return {
        "reason": "r",
        "trigger": 'action.verb.startsWith("put ") && observation.contains("closed")',
        "requirement": 'history.exists(h, h.verb.startsWith("open "))',
    }


def operation(**fields: Any) -> dict[str, Any]:
    empty = {"reason": "r", "operation": "add", "targets": [], "when": "", "steps": [], "pitfalls": [], "evidence": []}
    return empty | fields


def principle(**fields: Any) -> dict[str, Any]:
    texts = dict.fromkeys(["condition", "guidance", "expected_effect", "mechanism", "scope"], "")
    shared = {"reason": "r", "operation": "add", "targets": [], "exceptions": [], "any_task_type": False}
    return shared | texts | {"procedures": [], "evidence": []} | fields


class Bench:
    """A store, and a builder that asks ``answer``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store(f"sqlite:///{folder}/memory.db")

    def build(
        self, answer: Callable[[dict[str, Any]], Any], round: int = 0, sleep: Any = lambda _: None, **settings: Any
    ) -> BuildReport:
        """``answer``: a reply, or the object that one holds."""

        def reply(body: dict[str, Any]) -> Reply:
            value = answer(body)
            return value if isinstance(value, Reply) else Reply(json.dumps(value))

        model = {"model": "m", "concurrency": 2, "tries": 2, "reasks": 1, **settings.pop("model", {})}
        with ScriptedServer(reply) as server:
            made = BuilderSettings.model_validate({"model": {"url": server.url, **model}, **settings})
            client = LanguageModel(made.model, self.folder / "calls", sleep=sleep)
            report = LanguageModelBuilder(self.store, client, made, self.folder).build(round)
            client.close()
            self.requests = server.requests
        return report

    def asked(self) -> Counter[str]:
        return Counter(kind(body) for _, body in self.requests)


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    made = Bench(tmp_path)
    made.store.add_trajectories(TRAJECTORIES)
    yield made
    made.store.close()


def test_all_stages_from_trajectories_to_a_predicate(bench: Bench) -> None:
    report = bench.build(able)
    assert report.written == {"episode": 8, "procedure": 1, "principle": 1, "predicate": 1}
    assert report.operations == {"procedure add": 1, "principle add": 1}
    assert (report.refused, report.faults, report.waiting, report.stopped) == ([], [], 0, "")
    assert bench.asked() == {"episode": 8, "procedures": 1, "principles": 1, "harm": 1, "predicate": 1}
    assert report.spend["calls"] == 12
    retired, active = bench.store.items(3)
    assert isinstance(active.item, PrincipleItem)
    assert retired.status == "retired"
    assert retired.reason.startswith(f"now {active.id}")
    assert active.item.predicate is not None
    assert active.item.builder == "m principles@1 predicate@1"
    (verdict,) = bench.store.judgements(active.id, "harm")
    assert verdict.verdict["harmful"] is True
    assert bench.store.judgements(retired.id, "harm")[0].verdict["evidence"] == verdict.verdict["evidence"]
    # From the principle down to the raw steps.
    (down,) = bench.store.links(upper=active.id)
    assert {link.lower for link in bench.store.links(upper=down.lower)} == {s.id for s in bench.store.items(1)}
    assert bench.store.provenance() == {("rooms", str(number)) for number in range(8)}
    episode = bench.store.items(1)[0].item
    assert isinstance(episode, EpisodeItem)
    assert (episode.outcome, episode.builder) == ("success", "m episode@1")


def test_a_second_build_asks_only_about_what_is_new(bench: Bench) -> None:
    bench.build(able)
    assert bench.build(able, 1).spend["calls"] == 0
    assert bench.requests == []
    bench.store.add_trajectories([trajectory(8, True), trajectory(9, False)])
    report = bench.build(able, 2)
    assert report.written == {"episode": 2}
    assert report.operations == {"procedure merge": 1, "principle merge": 1}
    assert bench.asked() == {"episode": 2, "procedures": 1, "principles": 1}
    (procedure,) = bench.store.items(2)
    assert len(bench.store.links(upper=procedure.id)) == 10


def test_building_the_same_again_is_free(bench: Bench, tmp_path: Path) -> None:
    first = bench.build(able)
    other = Bench(tmp_path / "other")
    other.store.add_trajectories(TRAJECTORIES)
    (other.folder / "calls").symlink_to(bench.folder / "calls")
    again = other.build(able)
    assert other.requests == []
    assert (again.spend["calls"], again.spend["cached"], again.spend["cost"]) == (0, first.spend["calls"], 0.0)
    assert other.store.snapshot() == bench.store.snapshot()
    other.store.close()


def test_wrong_evidence_is_asked_for_again_then_left_out_and_counted(bench: Bench) -> None:
    def liar(body: dict[str, Any]) -> Any:
        answer = able(body)
        if kind(body) == "episode":
            good = answer["key_steps"][-1]
            answer["key_steps"] = [good, good | {"quote": "the king of France"}, good | {"step": 77}]
            answer["obstacles"] = [{"step": -1, "what": "x", "quote": "y"}]
        elif kind(body) in ("procedures", "principles"):
            answer["operations"][0]["evidence"] += [
                {"episode": "E99", "step": 0, "quote": "go to box 1"},
                {"episode": "E1", "step": 0, "quote": "go to Paris"},
            ]
        return answer

    report = bench.build(liar)
    assert report.written == {"episode": 8, "procedure": 1, "principle": 1, "predicate": 1}
    assert report.spend["unusable"] == {"wrong evidence or operation": 2 * (8 + 1 + 1)}  # asked again once each
    assert len(report.refused) == 8 * 3 + 2 + 2
    episodes = [stored.item for stored in bench.store.items(1)]
    assert all(isinstance(e, EpisodeItem) and len(e.key_steps) == 1 and not e.obstacles for e in episodes)
    # The store has rejected and counted them too: quotes and steps, which are evidence in form.
    assert sum(rejection.times for rejection in bench.store.rejections()) == 8 * 2 + 1 + 1
    followed = [body["messages"] for _, body in bench.requests if len(body["messages"]) == 4]
    assert any("does not stand in it" in messages[3]["content"] for messages in followed)


def test_a_model_without_a_true_word_writes_nothing(bench: Bench) -> None:
    def liar(body: dict[str, Any]) -> Any:
        return {"goal": "g", "key_steps": [{"step": 0, "what": "w", "quote": "untrue"}], "obstacles": []}

    report = bench.build(liar)
    assert bench.store.items(1) == []
    assert (report.waiting, len(report.faults)) == (8, 8)


def test_every_operation(bench: Bench) -> None:
    evidence = [{"episode": "E1", "step": 0, "quote": "go to box 1"}]
    script = {
        "procedures": [
            [
                operation(when="a", steps=["x {0}"], evidence=evidence),
                operation(when="b", steps=["y {0}"], evidence=evidence),
                operation(when="c", steps=["z {0}"], evidence=evidence),
                operation(when="d", steps=["w {0}"], evidence=evidence),
            ],
            [
                operation(operation="refine", targets=["P1"], when="a, exactly", steps=["x {0}"]),
                operation(operation="merge", targets=["P2", "P3"], when="b or c", steps=["y {0}"], evidence=evidence),
                operation(operation="contradict", targets=["P4"], evidence=evidence),
                operation(operation="retire", targets=["P1"]),  # refined a moment ago
                operation(operation="retire", targets=["P9"]),
                operation(operation="merge", targets=["P4"]),
            ],
            [operation(operation="retire", targets=["P1", "P2"], reason="useless")],
        ],
        "principles": [[principle(condition="c", guidance="g", procedures=["P1"], evidence=evidence)], [], []],
    }

    def answer(body: dict[str, Any]) -> Any:
        stage = kind(body)
        if stage == "episode":
            return able(body)
        if stage == "harm":
            return {"why": "w", "evidence": [], "harmful": False}
        return {"operations": script[stage][number[0]]}

    number = [0]
    bench.build(answer)
    a, _, _, d = bench.store.items(2)
    (principle_id,) = [stored.id for stored in bench.store.items(3)]
    bench.store.add_trajectories([trajectory(8, True)])
    number[0] = 1
    report = bench.build(answer, 1)
    statuses = {stored.item.when: (stored.status, stored.reason) for stored in bench.store.items(2)}  # type: ignore[union-attr]
    refined, merged = bench.store.items(2)[4:]
    assert statuses["a"] == ("retired", f"refined into {refined.id}: r")
    assert statuses["b"] == ("retired", f"merged into {merged.id}: r")
    assert statuses["c"] == ("retired", f"merged into {merged.id}: r")
    assert statuses["d"][0] == "candidate"
    assert report.operations == {"procedure refine": 1, "procedure merge": 1, "procedure contradict": 1}
    assert [r.reason.split(":")[0] for r in report.refused] == ["retire", "retire", "merge"]
    # What the old ones rested on, the new ones do, and what rested on the old ones rests on the new ones.
    assert {link.lower for link in bench.store.links(upper=refined.id)} == {
        link.lower for link in bench.store.links(upper=a.id)
    }
    assert principle_id in {link.upper for link in bench.store.links(lower=refined.id)}
    assert len(bench.store.links(upper=merged.id)) == 2  # both old ones cited the same step; and the new one
    assert [link.relation for link in bench.store.links(upper=d.id)] == ["supports", "contradicts"]
    bench.store.add_trajectories([trajectory(9, True)])
    number[0] = 2
    report = bench.build(answer, 2)
    assert report.operations == {"procedure retire": 1}
    in_use = [stored for stored in bench.store.items(2) if stored.status != "retired"]
    assert len(in_use) == 1


def test_what_was_validated_is_not_the_models_to_undo(bench: Bench) -> None:
    bench.build(able)
    (active,) = [stored for stored in bench.store.items(3) if stored.status == "candidate"]
    bench.store.set_status(active.id, "validated", "it helped")
    evidence = [{"episode": "E1", "step": 0, "quote": "go to box 1"}]

    def undo(body: dict[str, Any]) -> Any:
        if kind(body) != "principles":
            return able(body)
        refined = principle(
            operation="refine", targets=["R1"], condition="c", guidance="g", procedures=["P1"], evidence=evidence
        )
        return {"operations": [refined, principle(operation="retire", targets=["R1"])]}

    bench.store.add_trajectories([trajectory(9, False)])
    report = bench.build(undo, 1)
    assert bench.store.item(active.id).status == "validated"
    assert [refusal.reason for refusal in report.refused] == [
        f"{active.id} is validated: it stays, whatever the model says of it"
    ] * 2
    assert report.written["principle"] == 1  # the refined one stands beside it


@pytest.mark.parametrize(
    ("answer", "judged", "written"),
    [
        ({"why": "w", "evidence": [], "harmful": False}, {"harmless": 1}, 0),
        ({"why": "w", "evidence": [], "harmful": True}, {"harmless": 1}, 0),
        (
            {"why": "w", "evidence": [{"episode": "E1", "step": 1, "quote": "nowhere"}], "harmful": True},
            {"harmless": 1},
            0,
        ),
    ],
)
def test_no_predicate_without_a_judgement_of_harm_that_cites(
    bench: Bench, answer: dict[str, Any], judged: dict[str, int], written: int
) -> None:
    report = bench.build(lambda body: answer if kind(body) == "harm" else able(body))
    assert report.judged == judged
    assert report.written["predicate"] == written
    assert bench.asked()["predicate"] == 0
    (principle_,) = bench.store.items(3)
    assert bench.store.judgements(principle_.id, "harm")[-1].verdict["harmful"] is False


@pytest.mark.parametrize(("repairs", "asked", "written"), [(0, 1, 0), (1, 2, 0), (2, 3, 1)])
def test_predicates_are_repaired_a_configured_number_of_times(
    bench: Bench, repairs: int, asked: int, written: int
) -> None:
    tries = ["open(", "import('os')", 'action.verb.startsWith("put ")']

    def answer(body: dict[str, Any]) -> Any:
        if kind(body) != "predicate":
            return able(body)
        return {"reason": "r", "trigger": tries[len(body["messages"]) // 2 - 1], "requirement": "size(history) > 0"}

    report = bench.build(answer, repairs=repairs)
    assert bench.asked()["predicate"] == asked
    assert report.written["predicate"] == written
    assert len(report.refused) == 1 - written
    repaired = [body["messages"][-1]["content"] for _, body in bench.requests if kind(body) == "predicate"]
    assert all("The predicate is refused: trigger" in text for text in repaired[1:])
    assert bench.build(answer, 1, repairs=repairs).spend["calls"] == 0  # not asked for ever


def test_limits_leave_the_rest_for_the_next_build(bench: Bench) -> None:
    report = bench.build(able, max_trajectories=3)
    assert (report.written["episode"], report.waiting, report.stopped) == (3, 5, "")
    report = bench.build(able, 1, model={"max_calls": 2, "concurrency": 1})
    assert (report.written["episode"], report.waiting) == (2, 3)
    assert "max_calls" in report.stopped
    assert not report.failed
    report = bench.build(able, 2)
    assert (report.written["episode"], report.waiting, report.stopped) == (3, 0, "")
    (procedure,) = bench.store.items(2)
    assert len(bench.store.links(upper=procedure.id)) == 8


def test_a_dead_server_stops_the_build_soon(bench: Bench) -> None:
    report = bench.build(lambda _: Reply("down", status=500), model={"concurrency": 1})
    assert report.stopped.startswith("3 requests failed one after the other")
    assert len(bench.requests) == 3 * 2
    assert report.failed
    assert report.waiting == 8
    assert bench.build(able, 1).written["episode"] == 8


TABLE = re.compile(r"^(episode|procedures|principles|harm|predicate) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)$")


def table(report: BuildReport) -> dict[str, tuple[int, ...]]:
    """Stage -> answers, complete, valid, grounded, items, as printed."""
    found = [TABLE.match(line) for line in report.lines()]
    return {row[1]: tuple(map(int, row.groups()[1:])) for row in found if row}


def test_the_report_tells_the_yield_of_each_stage(bench: Bench) -> None:
    def answer(body: dict[str, Any]) -> Any:
        good, text = able(body), material(body)
        if kind(body) == "episode" and "lamp 0" in text:
            return Reply(json.dumps(good)[:50], finish="length")  # twice: it is asked again once
        if kind(body) == "episode" and "lamp 1" in text:
            return Reply("no")
        if kind(body) == "episode" and "lamp 2" in text:
            good["key_steps"][0]["quote"] = "never said"
        return good

    report = bench.build(answer)
    # 8 trajectories, 3 of them asked for twice: 11 answers; 2 cut off, 2 no JSON, 2 with a wrong quote.
    assert table(report) == {
        "episode": (11, 9, 7, 5, 6),
        "procedures": (1, 1, 1, 1, 1),
        "principles": (1, 1, 1, 1, 1),
        "harm": (1, 1, 1, 1, 1),
        "predicate": (1, 1, 1, 1, 1),
    }
    # From the cache the same is told again, of what is left to be asked.
    assert table(bench.build(answer, 1)) == {"episode": (4, 2, 0, 0, 0)}


def test_a_server_that_ignores_the_schema_is_told_of(bench: Bench) -> None:
    def answer(body: dict[str, Any]) -> Any:
        return able(body) | {"confidence": 1} if kind(body) == "harm" else able(body)

    report = bench.build(answer)
    assert report.spend["unusable"] == {"not as the schema says": 2}
    (told,) = [line for line in report.lines() if line.startswith("the server")]
    assert told.startswith("the server took the schema and let 2 answers break it: it does not enforce all of it")
    assert '--structured-outputs-config \'{"backend": "guidance"' in told


@pytest.mark.parametrize(
    ("refused", "form"), [({"json_schema"}, "json_object"), ({"json_schema", "json_object"}, "text")]
)
def test_a_server_that_refuses_the_schema_is_told_of(bench: Bench, refused: set[str], form: str) -> None:
    def answer(body: dict[str, Any]) -> Any:
        if body.get("response_format", {}).get("type") in refused:
            return Reply("response_format is not supported", status=400)
        return able(body)

    report = bench.build(answer, model={"concurrency": 1})
    assert report.written == {"episode": 8, "procedure": 1, "principle": 1, "predicate": 1}
    assert report.spend["retried"] == {"HTTP 400 to a response format": len(refused) + 1}  # with and without lengths
    assert f"the server refused model.structured 'json_schema'; it was asked with {form!r} instead" in report.lines()


def test_a_server_that_keeps_to_the_schema_is_not(bench: Bench) -> None:
    assert not [line for line in bench.build(able).lines() if line.startswith("the server")]


def test_a_step_too_large_for_a_database_is_a_wrong_claim(bench: Bench) -> None:
    def answer(body: dict[str, Any]) -> Any:
        good = able(body)
        if kind(body) == "episode":
            good["obstacles"] = [good["key_steps"][0] | {"step": 10**30}]
        return good

    report = bench.build(answer)
    assert report.written["episode"] == 8
    assert len(report.refused) == 8


def test_requests_that_are_too_long_do_not_stop_the_build(bench: Bench) -> None:
    def answer(body: dict[str, Any]) -> Any:
        if kind(body) == "episode" and "failure" in material(body):
            return Reply("context too long", status=400)
        return able(body)

    report = bench.build(answer, model={"concurrency": 1})
    assert (report.written["episode"], report.waiting, report.failed, report.stopped) == (4, 4, False, "")
    assert all("HTTP 400: context too long" in fault.reason for fault in report.faults)


def test_hopeless_trajectories_do_not_take_the_limit_of_every_build(bench: Bench) -> None:
    def answer(body: dict[str, Any]) -> Any:
        return Reply("no") if kind(body) == "episode" and "failure" in material(body) else able(body)

    written = [bench.build(answer, round, max_trajectories=2).written["episode"] for round in range(4)]
    assert sum(written) == 4  # all that can be told, though every second one cannot


def test_an_unanswered_prompt_does_not_block_what_is_new(bench: Bench) -> None:
    def answer(body: dict[str, Any]) -> Any:
        return Reply("no") if kind(body) == "procedures" and "lamp 0" in material(body) else able(body)

    assert bench.build(answer, episodes_per_call=4).written["procedure"] == 0
    bench.store.add_trajectories([trajectory(number, True) for number in range(20, 24)])
    assert bench.build(answer, 1, episodes_per_call=4).written["procedure"] == 1


def test_trajectories_without_an_action_are_counted(bench: Bench) -> None:
    bench.store.add_trajectories([Trajectory(source="s", world="rooms", grammar="g", task="none")])
    assert bench.build(able).empty == 1


def test_a_build_goes_on_after_a_kill_and_names_a_damaged_journal(bench: Bench) -> None:
    bench.build(able)
    journal = bench.folder / "build.jsonl"
    lines = journal.read_text().splitlines()
    assert [json.loads(line)["stage"] for line in lines] == ["procedures", "principles", "predicate", "build"]
    assert json.loads(lines[-1])["spend"]["calls"] == 12
    journal.write_text("\n".join([*lines[:1], lines[1][:20]]))  # killed while it wrote the second line
    report = bench.build(able, 1)
    assert bench.asked() == {"principles": 1}  # it now sees the principle that it wrote
    assert report.operations == {"principle merge": 1}
    journal.write_text("{\n")
    with pytest.raises(MemoryRecordError, match="line 1 is damaged"):
        bench.build(able)


def test_the_journal_of_another_memory_does_not_count(bench: Bench, tmp_path: Path) -> None:
    first = bench.build(able)
    other = Bench(tmp_path / "other")
    other.store.add_trajectories(TRAJECTORIES)
    for name in ("calls", "build.jsonl"):
        (other.folder / name).symlink_to(bench.folder / name)
    assert other.build(able).written == first.written
    assert other.requests == []
    other.store.close()


@pytest.mark.parametrize("seed", range(2))
def test_a_server_that_errs_in_every_way_loses_nothing(bench: Bench, seed: int) -> None:
    """Half of the requests meet a fault, of every kind in turn; three builds in a row have to mend it."""
    bench.store.add_trajectories([trajectory(number, number % 3 == 0) for number in range(8, 24)])
    draw = random.Random(seed)
    turn: list[str] = []
    met: Counter[str] = Counter()

    def bad(body: dict[str, Any]) -> Any:
        if draw.random() < 0.5:
            return able(body)
        text = json.dumps(able(body))
        faults = {
            "malformed": Reply(text[: len(text) // 2]),
            "prose": Reply("Certainly! Here is what you asked for."),
            "empty": Reply(""),
            "endless number": Reply('{"harmful": 1' + "0" * 5000 + "}"),
            "thinking": Reply(None, finish="length"),
            "cut off": Reply(text[: len(text) // 2], finish="length"),
            "schema": Reply('{"unexpected": 1}'),
            "evidence": Reply(text.replace('"quote": "', '"quote": "never said ')),
            "surrogate": Reply(
                text.replace('"reason": "r"', '"reason": "\\ud800\\u0000"').replace("did", "\\ud800 did")
            ),
            "429": Reply("slow down", status=429, headers={"Retry-After": "3"}),
            "500": Reply("oops", status=500),
            "no choices": Reply(raw="{}"),
            "time-out": Reply(text, delay_s=3.0),
            "hang up": Reply(hang_up=True),
        }
        if not turn:
            turn.extend(draw.sample(sorted(faults), len(faults)))
        name = turn.pop()
        met[name] += 1
        return faults[name]

    reports = [bench.build(bad, round, model={"timeout_s": 2.0, "tries": 4, "reasks": 3}) for round in range(3)]
    assert len(met) == 14
    # Nothing is lost: what has no episode yet is waiting, and the last build says so.
    told = {stored.item.trajectory for stored in bench.store.items(1)}  # type: ignore[union-attr]
    assert len(told) == sum(report.written["episode"] for report in reports)
    assert len(told) + reports[-1].waiting == 24
    assert len(told) >= 22
    # All is counted, by its kind.
    retried = sum((Counter(report.spend["retried"]) for report in reports), Counter())
    unusable = sum((Counter(report.spend["unusable"]) for report in reports), Counter())
    assert retried["HTTP 429"] == met["429"]
    assert retried["HTTP 500"] == met["500"]
    assert retried["no answer in HTTP 200"] == met["no choices"]
    assert retried["RemoteProtocolError"] == met["hang up"]
    assert retried["ReadTimeout"] >= met["time-out"]
    # An unusable answer that the cache repeats to a later build is counted there again.
    assert unusable["cut off"] >= met["cut off"] + met["thinking"]
    assert unusable["not JSON"] >= met["malformed"] + met["prose"] + met["empty"] + met["endless number"]
    assert unusable["not as the schema says"] >= met["schema"]
    assert unusable["wrong evidence or operation"] >= met["evidence"] - 1  # a predicate quotes nothing


def test_material_tells_repeated_steps_once_and_keeps_within_its_size() -> None:
    failed = TRAJECTORIES[1]
    text = episode_material(failed, 500, 10_000)
    assert (
        "[1]\n    action: put lamp 1 in box 1\n    answer (refused): Nothing happens.\n[2]-[3] the same again" in text
    )
    steps = tuple(
        TraceStep(index=i, observation="o", thought=f"{i} " + "x" * 500, action="a", result="r" * 500)
        for i in range(200)
    )
    long = failed.model_copy(update={"steps": steps})
    text = episode_material(long, 100, 3000)
    assert len(text) < 4500
    assert "[0]\n" in text
    assert "[199]\n" in text
    assert "steps left out here" in text


def test_contrast_pairs_each_failure_with_the_nearest_success() -> None:
    def attempt(goal: str, success: bool) -> Attempt:
        item = EpisodeItem(
            world="w", grammar="g", trajectory="t-1", goal=goal, outcome="success" if success else "failure"
        )
        return Attempt(item, TRAJECTORIES[0])

    all_ = [attempt("heat an egg", True), attempt("cool a cup", True), attempt("cool a mug", False)]
    assert [a.episode.goal for a in contrast(all_, 2)] == ["cool a mug", "cool a cup"]
    assert [a.episode.goal for a in contrast(all_[:2], 9)] == ["heat an egg", "cool a cup"]
    assert [a.episode.goal for a in beside(all_[2:], all_[:2], 1)] == ["cool a cup"]
    assert beside(all_, all_, 1) == []


def test_texts_are_cut_in_the_middle() -> None:
    assert cut("a  b\nc", 10) == "a b c"
    assert cut("0123456789" * 3, 12) == "01234567 […] 6789"


def test_instructions_are_versioned_files() -> None:
    for name in ("episode", "procedures", "principles", "harm", "predicate"):
        prompt = instructions(name)
        assert prompt.label == f"{name}@{prompt.version}"
        assert "Answer with one JSON object" in prompt.text
    assert isinstance(ProcedureItem(world="w", grammar="g", when="w", steps=("a",)).id, str)
