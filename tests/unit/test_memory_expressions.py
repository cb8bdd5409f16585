"""The static check: what it lets through is bounded, and means in CEL what it meant here."""

import contextlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory.expressions import (
    INT,
    MAX_COST,
    ExpressionError,
    Type,
    compile_expression,
    list_of,
    text,
    translate_pattern,
)
from memory.predicates import CONTEXT, compile_predicate
from memory.records import Predicate

pytestmark = pytest.mark.unit

SMALL = {"s": text(10), "n": INT, "xs": list_of(INT, 4), "r": Type("record", fields={"a": text(5)})}


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("n>1&&n<3||s=='a'", 'n > 1 && n < 3 || s == "a"'),
        ("n > 1 && (n < 3 || s == 'a')", 'n > 1 && (n < 3 || s == "a")'),
        ("!(n == 1)", "!(n == 1)"),
        ("!s.contains('a')", '!s.contains("a")'),
        ("1 - (2 - 3) == n", "1 - (2 - 3) == n"),
        ("(1 - 2) - 3 == -n", "1 - 2 - 3 == -n"),
        ("n in [1, 2,3]", "n in [1, 2, 3]"),
        ("xs.all(x, x > 0 && x < n)", "xs.all(x, x > 0 && x < n)"),
        ("(n > 1 ? s : 'b') == 'c'", '(n > 1 ? s : "b") == "c"'),
        ("r['a'] == r.a", "r.a == r.a"),
        (r"s == 'it\'s \"x\" \\ \x41é'", r'''s == "it's \"x\" \\ Aé"'''),
        (r"s.matches(r'\d+ \w')", r"""s.matches("[0-9]+ [0-9A-Za-z_]")"""),
        ("s.size() + size(xs) > 3", "size(s) + size(xs) > 3"),
        ("xs.filter(x, x > 1).map(x, x + 1)[0] == 2", "xs.filter(x, x > 1).map(x, x + 1)[0] == 2"),
    ],
)
def test_what_cel_gets_is_written_from_the_tree(source: str, written: str) -> None:
    assert compile_expression(source, SMALL).source == written


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("", "ends too early"),
        ("n > 1 n", "the expression was complete before it"),
        ("n = 1", "cannot read"),
        ("n", "of type int; it must be bool"),
        ("m > 1", "there is no 'm'; known names are s, n, xs, r"),
        ("r.b == 'x'", "no field 'b'; 'r' has a"),
        ("s > 1", "must be int"),
        ("s == 1", "string and int do not go together"),
        ("n == 1.5", "cannot read"),
        ("s.lower() == 'a'", "function 'lower' is not allowed"),
        ("size(n) > 1", "of type int; it has none"),
        ("s.matches(s)", "must be a string literal"),
        ("xs.all(n, true)", "hides another n"),
        ("xs.all(in, true)", "cannot name a variable"),
        ("xs.all(x, xs.all(y, xs.all(z, true)))", "at most 2 are allowed"),
        ("xs.reduce(x, 1)", "function 'reduce' is not allowed"),
        ("__class__ == 'x'", "there is no '__class__'"),
        ("r.__class__ == 'x'", "no field '__class__'"),
        ("s.__class__ == 'x'", "has no field '__class__'"),
        ("__import__('os').system('true')", "function '__import__' is not allowed"),
        ("eval('1') == 1", "function 'eval' is not allowed"),
        ("{'a': 1}.a == 1", "cannot read"),
        ("n == 1 // comment", "a value is expected there"),
        ("n == 99999999999999999999", "at most 9 digits"),
        ("(" * 40 + "true" + ")" * 40, "nested more than 24 deep"),
        ("!" * 40 + "true", "one sign at most"),
        ("n == " + "+".join("1" * 300), "levels; shorten its chains"),
        ("true" + " && true" * 2000, "at most 1000 are allowed"),
        ("s == '" + "a" * 400 + "'", "at most 300 are allowed"),
        ("n in [" + ",".join("1" * 60) + "]", "at most 50 are allowed"),
        (r"s == '\ud800'", "half a surrogate pair"),
        (r"s == '\0'", "unknown escape"),
    ],
)
def test_what_is_refused(source: str, problem: str) -> None:
    with pytest.raises(ExpressionError) as refused:
        compile_expression(source, SMALL)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    "source",
    [
        "history.all(h, history.all(i, history.all(j, history.all(k, h == k))))",  # the one that took 2.9 s
        "admissible.all(a, history.filter(h, h.action == a).size() > 0)",  # 0.3 s: filter copies what it keeps
        "history.map(h, history).size() > 0",  # 0.26 s
        "admissible.map(a, admissible.map(b, a + b)).size() > 0",
        "history.all(h, h.result.matches('(a?){20}(b?){20}.{20}'))",
    ],
)
def test_costs_are_bounded(source: str) -> None:
    with pytest.raises(ExpressionError, match=r"steps, 100000 are allowed|at most 2 are allowed"):
        compile_expression(source, CONTEXT)


@pytest.mark.parametrize(
    "source",
    [
        "!history.exists(h, h.action == action.text && !h.valid)",
        "history.filter(h, h.action == action.text).size() < 3",
        "admissible.exists(a, !history.exists(h, h.action == a))",
        "size(admissible) == 0 || action.text in admissible",
        "size(history) == 0 || history[size(history) - 1].action != action.text",
        r"observation.matches('(?i)\\bopen(ed)? the \\w+ \\d+')",
        "size(action.args) > 1 && goal.contains(action.args[1])",
    ],
)
def test_what_rules_need_is_allowed(source: str) -> None:
    assert compile_expression(source, CONTEXT).cost < MAX_COST


def test_costs_by_hand() -> None:
    # n: 1, 1: 1, >: 1
    assert compile_expression("n > 1", SMALL).cost == 3
    # xs: 1; four turns of 3 (overhead) + 3 (x > 1)
    assert compile_expression("xs.all(x, x > 1)", SMALL).cost == 1 + 4 * (3 + 3)
    # as above, 8 copies of ints; size 1, > 1, 0 1
    assert compile_expression("xs.filter(x, x > 1).size() > 0", SMALL).cost == 1 + 4 * (3 + 3) + 8 + 3


def test_both_sides_of_a_predicate_are_named() -> None:
    with pytest.raises(ExpressionError, match=r"^requirement: there is no 'x'"):
        compile_predicate(Predicate(trigger="step > 1", requirement="x == 1"))
    compiled = compile_predicate(Predicate(trigger="step > 1", requirement="size(history) < 3"))
    assert compiled.source == "(step > 1) ? ((size(history) < 3) ? 1 : 2) : 0"
    assert compiled.names == {"step", "history"}


@pytest.mark.parametrize(
    ("pattern", "written", "states"),
    [
        ("a.c", "a.c", 3),
        (r"\d{3}", "[0-9]{3}", 3),
        (r"\W", "[^0-9A-Za-z_]", 1),
        (r"(ab|c)*?$", "(?:ab|c)*?$", 6),
        (r"[\w-]", r"[0-9A-Za-z_\-]", 1),
        ("[^a-z&]", r"[^a-z\&]", 1),
        ("(a{10}){5}", "(?:a{10}){5}", 55),
        ("(?i)a{2,}", "(?i)a{2,}", 3),
        ("it's 100%", "it's 100%", 9),
    ],
)
def test_patterns(pattern: str, written: str, states: int) -> None:
    assert (translate_pattern(pattern)[0], translate_pattern(pattern)[2]) == (written, states)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a{100}){100}",
        "((a{10}){10}){10}",
        "a{999}",
        "a**",
        "(?<n>a)",
        "(?=a)",
        r"\1",
        r"\p{L}",
        "[z-a]",
        "[a",
        "(a",
        "a)",
        "*a",
        "a{2,1}",
        "[]",
        r"[a-\d]",
        "(?s).",
    ],
)
def test_refused_patterns(pattern: str) -> None:
    with pytest.raises(ExpressionError):
        translate_pattern(pattern)


@pytest.mark.parametrize("pattern", ["a" * 101, "((((((a))))))", "\\", r"\xff"])
def test_more_refused_patterns(pattern: str) -> None:
    with pytest.raises(ExpressionError):
        translate_pattern(pattern)


@settings(max_examples=300)
@given(st.text(st.sampled_from("()[]{}'\"\\!&|<>=+-*/%.,?: \n_anxrsh019é" + "\ud800"), max_size=60))
def test_garbage_is_refused_or_checked_quickly(source: str) -> None:
    started = time.process_time()
    with contextlib.suppress(ExpressionError):
        compile_expression(source, SMALL)
    assert time.process_time() - started < 0.05


@given(st.text(st.sampled_from("()[]{}\\^$*+?|.-,&~ad0159wDsb "), max_size=30))
def test_garbage_patterns(pattern: str) -> None:
    try:
        written, cost, states = translate_pattern(pattern)
    except ExpressionError:
        return
    assert states <= 120
    assert cost >= 40
    assert len(written) <= 40 + 16 * len(pattern)
