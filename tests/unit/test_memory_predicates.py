"""The context of predicates, and the host that evaluates them: what hangs is killed, and nobody waits for it."""

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memory import predicates
from memory.expressions import ExpressionError
from memory.predicates import (
    CompiledPredicate,
    PredicateHost,
    Step,
    Verdict,
    compile_predicate,
    history_entry,
    make_context,
    trajectory_steps,
)
from memory.records import MemoryRecordError, Predicate, TraceStep

pytestmark = pytest.mark.unit

HANGING = "history.all(a, history.all(b, history.all(c, history.all(d, true)))) ? 1 : 2"
"""6 million turns: seconds, with the interpreter lock held. The static check refuses it."""
CHEAP = Predicate(trigger="action.verb == 'take {0}'", requirement="step < 10")


def parse(action: str) -> tuple[str, tuple[str, ...]]:
    verb, *names = action.split()
    return " ".join([verb, *(f"{{{i}}}" for i in range(len(names)))]), tuple(names)


def context(action: str = "take mug", step: int = 50) -> predicates.Context:
    history = [history_entry(f"open box{i}", parse, "word " * 200, i % 2 == 0) for i in range(60)]
    return make_context(
        action,
        parse,
        observation="You see a mug. " * 200,
        goal="find the mug",
        step=step,
        history=history,
        admissible=[f"open box{i}" for i in range(150)],
    )


@pytest.fixture(scope="module")
def host() -> Iterator[PredicateHost]:
    with PredicateHost() as found:
        found.wait_ready()
        yield found


@pytest.fixture
def patient() -> Iterator[PredicateHost]:
    """A host that gives a loaded machine time; how long things take is asserted by the tests."""
    with PredicateHost(deadline=5.0) as found:
        found.wait_ready()
        yield found


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicates that start with ! pass the static check: what follows is evaluated as it is."""
    checked = compile_predicate

    def compile_(predicate: Predicate) -> CompiledPredicate:
        if predicate.trigger.startswith("!"):
            return CompiledPredicate(predicate.trigger[1:], 10**6, frozenset({"history"}))
        return checked(predicate)

    monkeypatch.setattr(predicates, "compile_predicate", compile_)


def test_the_context_is_capped() -> None:
    found = context()
    assert found["action"] == {"text": "take mug", "verb": "take {0}", "args": ["mug"]}
    assert len(found["observation"]) == 2000
    assert len(found["history"]) == 50
    assert found["history"][-1] == {
        "action": "open box59",
        "verb": "open {0}",
        "args": ["box59"],
        "result": ("word " * 100),
        "valid": False,
    }
    assert len(found["admissible"]) == 100


def test_a_long_list_keeps_the_proposed_action() -> None:
    actions = [f"open box{i}" for i in range(150)]
    listed = make_context("open box140", parse, observation="", admissible=actions)["admissible"]
    assert (len(listed), listed[0], listed[-1]) == (100, "open box0", "open box140")
    assert make_context("sing", parse, observation="", admissible=actions)["admissible"] == actions[:100]
    assert make_context("sing", parse, observation="")["admissible"] == []


def test_half_a_surrogate_pair_does_not_reach_cel(patient: PredicateHost) -> None:
    found = make_context("take \ud800", parse, observation="\udfff")
    assert found["action"]["text"] == "take ?"
    rule = Predicate(trigger="observation == '?'", requirement="action.text == 'take ?'")
    assert patient.check_now({"a": rule}, found) == {"a": Verdict("followed")}


def test_a_trajectory_gives_the_contexts_that_were_seen_live(patient: PredicateHost) -> None:
    steps = [
        TraceStep(index=0, observation="room", action="open box", result="It is open.", valid=True),
        TraceStep(index=1, observation="It is open.", action=None, result="What?"),
        TraceStep(index=2, observation="What?", action="take mug", result="Taken.", valid=None, inventory=()),
        TraceStep(
            index=3,
            observation="Taken.",
            action="take mug",
            result="Nothing happens.",
            valid=False,
            inventory=("mug", "key"),
        ),
    ]
    found = trajectory_steps(steps, parse, "goal", "kind")
    assert [position for position, _ in found] == [0, 2, 3]
    rules = [
        Predicate(trigger="true", requirement="size(history) == 0 || history[size(history) - 1].valid"),
        Predicate(trigger="step == 2", requirement="size(history) == 1 && history[0].result == 'It is open.'"),
        Predicate(trigger="step == 3", requirement="history.map(h, h.action) == ['open box', 'other']"),
        Predicate(trigger="action.verb == 'take {0}'", requirement="!(action.args[0] in inventory)"),
    ]
    outcomes = patient.check_steps([compile_predicate(rule) for rule in rules], [step for _, step in found], 5.0)
    assert outcomes is not None
    assert [[verdict.outcome for verdict in row] for row in outcomes] == [
        ["followed", "idle", "idle", "idle"],
        ["followed", "followed", "idle", "followed"],
        ["followed", "idle", "violated", "violated"],
    ]


def test_verdicts(patient: PredicateHost) -> None:
    rules = {
        "idle": Predicate(trigger="step < 10", requirement="false"),
        "followed": Predicate(trigger="step > 10", requirement="action.args[0] == 'mug'"),
        "violated": Predicate(trigger="action.verb == 'take {0}'", requirement="history.exists(h, h.action == 'go')"),
        "raises": Predicate(trigger="history[70].valid", requirement="true"),
        "refused": Predicate(trigger="action.text.lower() == 'a'", requirement="true"),
        "divides": Predicate(trigger="1 / (step - 50) == 0", requirement="true"),
    }
    verdicts = asyncio.run(patient.check(rules, context()))
    assert {name: verdict.outcome for name, verdict in verdicts.items()} == {
        "idle": "idle",
        "followed": "followed",
        "violated": "violated",
        "raises": "error",
        "refused": "error",
        "divides": "error",
    }
    assert "out of bounds: 70" in verdicts["raises"].note
    assert "function 'lower' is not allowed" in verdicts["refused"].note
    assert patient.killed == 0
    assert asyncio.run(patient.check({}, context())) == {}


@pytest.mark.usefixtures("unchecked")
def test_what_hangs_is_killed_and_replaced_and_the_others_are_judged() -> None:
    hanging = Predicate(trigger=f"!{HANGING}", requirement="true")
    with PredicateHost(workers=1, deadline=1.5) as host:  # it takes seconds, and a loaded machine needs time to begin
        verdicts = asyncio.run(host.check({"hanging": hanging, "cheap": CHEAP}, context()))
        assert verdicts["cheap"] == Verdict("violated")
        assert verdicts["hanging"].outcome == "error"
        assert "took more than 1500 ms" in verdicts["hanging"].note
        assert (host.killed, host.unjudged) == (1, 0)
        assert _eventually_judges(host)


@pytest.mark.usefixtures("unchecked")
def test_nobody_is_held_up_longer_than_the_deadline(host: PredicateHost) -> None:
    """One check of a predicate that hangs takes no longer than sleeping 50 ms beside it; nor do forty at once."""
    hanging = {"hanging": Predicate(trigger=f"!{HANGING}", requirement="true")}
    proposed = context()

    async def timed(waiting: Awaitable[object]) -> float:
        started = time.monotonic()
        await waiting
        return time.monotonic() - started

    async def excess(checks: int) -> float:
        slept, *waits = await asyncio.gather(
            timed(asyncio.sleep(host.deadline)), *(timed(host.check(hanging, proposed)) for _ in range(checks))
        )
        return max(waits) - slept

    for checks in (1, 40):
        # The median: what the machine's other work adds to one of the two sides now and then is no matter.
        assert statistics.median(asyncio.run(excess(checks)) for _ in range(9)) < 0.01
    assert _eventually_judges(host)


@pytest.mark.usefixtures("unchecked")
def test_a_process_that_dies_costs_the_predicate_its_verdict(patient: PredicateHost) -> None:
    deep = "'a'" + "+'a'" * 20_000 + " == 'a' ? 1 : 2"  # overflows the stack of the process
    verdicts = patient.check_now({"deep": Predicate(trigger=f"!{deep}", requirement="true")}, context())
    assert verdicts["deep"].outcome == "error"
    assert patient.killed == 1
    assert _eventually_judges(patient)


def test_bulk_evaluation_that_takes_too_long_gives_nothing(host: PredicateHost) -> None:
    hanging = CompiledPredicate(HANGING, 1, frozenset({"history"}))
    entry = history_entry("a", parse, "", True)
    assert host.check_steps([hanging], [Step({}, entry)] * 60, 0.2) is None
    assert _eventually_judges(host)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads the environment of a process from /proc")
def test_the_environment_stays_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    worker = predicates._Worker()
    try:
        worker.wait_ready()
        environment = Path(f"/proc/{worker._process.pid}/environ").read_bytes()
    finally:
        worker.discard()
    assert b"secret" not in environment


def test_a_worker_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(MemoryRecordError, match="install common-expression-language"):
        PredicateHost()


def test_workers_end_with_their_host() -> None:
    host = PredicateHost()
    host.wait_ready()
    pids = [worker._process.pid for worker in host._workers]
    assert len(pids) == 2
    host.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert host.check_now({"a": CHEAP}, context()) == {"a": Verdict("unjudged")}
    assert asyncio.run(host.check({"a": CHEAP}, context())) == {"a": Verdict("unjudged")}
    assert host.unjudged == 2


def _eventually_judges(host: PredicateHost) -> bool:
    """Whether a worker is there again (it takes 0.1 s to start)."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if host.check_now({"a": CHEAP}, context())["a"] == Verdict("violated"):
            return True
        time.sleep(0.05)
    return False


STRINGS = st.sampled_from(
    ["action.text", "observation", "goal", "action.verb", "'a'", "h.result", "a", "history[0].action", "'é\\n\"'"]
)
NUMBERS = st.sampled_from(["step", "size(history)", "1", "size(observation)", "-3", "size(action.args)", "999999999"])
PATTERNS = st.sampled_from(
    [
        "'(a+)+$'",
        r"'(\\w+\\s?)+$'",
        "'(.*a){20}'",
        "'(?i)(x|y)*z'",
        r"r'\bmug\b'",
        "'[^a]{50}'",
        "'(a|aa)+b'",
        "'.{60}'",
    ]
)


def _booleans(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    lists = st.sampled_from(["history", "admissible", "inventory", "[history, history]", "history.filter(f, f.valid)"])
    return st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["&&", "||", "=="]), inner),
        st.builds("!({})".format, inner),
        st.builds("{}.{}(h, {})".format, lists, st.sampled_from(["all", "exists", "exists_one"]), inner),
        st.builds("admissible.{}(a, {})".format, st.sampled_from(["all", "exists"]), inner),
        st.builds("history.{}(h, {}).size() > 2".format, st.sampled_from(["filter", "map"]), inner),
        st.builds("history.map(h, {} + {}) == []".format, STRINGS, STRINGS),
        st.builds("({} ? {} : {})".format, inner, inner, inner),
    )


LEAVES = st.one_of(
    st.builds("{} == {}".format, STRINGS, STRINGS),
    st.builds("{}.contains({})".format, STRINGS, STRINGS),
    st.builds("{}.matches({})".format, STRINGS, PATTERNS),
    st.builds("{} {} {}".format, NUMBERS, st.sampled_from(["<", ">=", "==", "!="]), NUMBERS),
    st.builds("{} * {} + {} > {} / {}".format, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    st.sampled_from(["true", "action.text in admissible", "h.valid", "history == history", "h in history"]),
    st.sampled_from(["().__class__", "action.__dict__ == 'a'", "getattr(action, 'x')", "[1,2,3", "a.b.c.d()", "\x00"]),
)


@pytest.mark.timeout(1200)  # some fifteen seconds of one quiet core, two tests together
@settings(max_examples=2500, suppress_health_check=[HealthCheck.too_slow])
@given(st.recursive(LEAVES, _booleans, max_leaves=12), st.recursive(LEAVES, _booleans, max_leaves=4))
def test_fuzz_whatever_is_let_through_is_understood_by_cel_and_fast(trigger: str, requirement: str) -> None:
    """No reply is a crash, a time-out or a syntax error of CEL, with every list and text of the context at its cap."""
    predicate = Predicate(trigger=trigger, requirement=requirement)
    began = time.thread_time()
    try:
        compiled = compile_predicate(predicate)
    except ExpressionError:
        compiled = None
    if time.thread_time() - began >= 0.05:  # again: the first time may have hit a collection of garbage
        began = time.thread_time()
        with contextlib.suppress(ExpressionError):
            compile_predicate.__wrapped__(predicate)
        assert time.thread_time() - began < 0.05
    if compiled is None:
        return
    verdict, milliseconds = _fuzzed(compiled.source, compiled.names)
    assert verdict.outcome in ("idle", "followed", "violated", "error")
    if verdict.outcome == "error":
        assert verdict.note.startswith(("IndexError", "OverflowError", "ZeroDivisionError")), (compiled.source, verdict)
    if milliseconds >= 30:  # to read the context takes most of it
        times = [_fuzzed(source, compiled.names)[1] for source in ("step > 0 ? 1 : 2", compiled.source) * 3]
        milliseconds = min(times[1::2]) - min(times[::2])
    assert milliseconds < 30, (compiled.source, compiled.cost, milliseconds)


@pytest.mark.timeout(1200)
@settings(max_examples=1500)
@given(st.text(st.sampled_from("()[]{}\\^$*+?|.-,&~ad0159wDsb é"), max_size=12))
def test_fuzz_patterns_that_are_let_through_are_patterns_of_cel_too(pattern: str) -> None:
    quoted = pattern.replace("\\", "\\\\")
    try:
        compiled = compile_predicate(Predicate(trigger=f"'a 1'.matches('{quoted}')", requirement="true"))
    except ExpressionError:
        return
    verdict, _ = _fuzzed(compiled.source, compiled.names)
    assert verdict.outcome in ("idle", "followed"), (compiled.source, verdict)


_FUZZ: list[PredicateHost] = []


@pytest.fixture(scope="module", autouse=True)
def _fuzz_host() -> Iterator[None]:
    with PredicateHost(workers=1, deadline=10.0) as found:
        _FUZZ[:] = [found]
        yield


def _full() -> predicates.Context:
    """A context with every list and text at its cap."""
    full = context()
    full["history"] = [{**entry, "args": ["mug"] * 5, "result": "a" * 500} for entry in full["history"]]
    full["observation"], full["admissible"] = "a" * 2000, ["a" * 300] * 100
    full["inventory"] = ["a" * 100] * 50
    return full


FULL = _full()


def _fuzzed(source: str, names: frozenset[str]) -> tuple[Verdict, float]:
    """The verdict on the full context, and the milliseconds of processor time that it takes."""
    [worker] = _FUZZ[0]._workers
    clock = (~worker._process.pid << 3) | 2  # clock_getcpuclockid of the worker
    request = predicates._request([source], names | {"step"}, FULL["history"], [Step(FULL)], 5, stream=False)
    started = time.clock_gettime(clock)
    [verdict] = worker.exchange(request, 1, time.monotonic() + 20)
    return verdict, 1000 * (time.clock_gettime(clock) - started)
