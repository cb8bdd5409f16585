"""The static check of predicate expressions: parsed, typed and bounded in cost before anything is evaluated.

Expressions come from language models, so they are untrusted. They are written in a subset of CEL (the Common Expression
Language, cel.dev): only what stands here parses, every value has a type whose size is bounded, and from the bounds
follows an upper bound of the cost. What is evaluated is not the source but the text that :func:`compile_expression`
writes from its own syntax tree, so that CEL sees what was checked and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from memory.records import MemoryRecordError

MAX_SOURCE = 1000
"""Characters of an expression."""
MAX_DEPTH = 24
"""Nesting of the syntax tree: CEL's parser and evaluator recurse, and overflow the stack on deep trees."""
MAX_COMPREHENSIONS = 2
"""all, exists, exists_one, map and filter within one another."""
MAX_ELEMENTS = 50
"""Elements of a list literal."""
MAX_TEXT = 300
"""Characters of a string literal."""
MAX_PATTERN = 100
"""Characters of a regular expression."""
MAX_STATES = 120
"""States of a regular expression, counted repetitions written out."""
MAX_COST = 100_000
"""Upper bound of an expression's cost, in visits of a simple node (0.1 to 0.2 microseconds)."""

Kind = Literal["bool", "int", "string", "list", "record"]


class ExpressionError(MemoryRecordError):
    """An expression that is refused; the message says what to write instead (a builder gets it for a repair)."""


@dataclass(frozen=True)
class Type:
    """A bounded type. ``size``: most characters of a string, most elements of a list."""

    kind: Kind
    size: int = 0
    element: Type | None = None
    """Of a list; None: of the empty list literal, which fits any."""
    fields: Mapping[str, Type] = field(default_factory=dict)

    @property
    def weight(self) -> int:
        """Cost of copying or comparing a value (cel copies lists deeply whenever it appends to one)."""
        if self.kind == "string":
            return 2 + self.size // 1000
        if self.kind == "list":
            return 1 + self.size * (self.element.weight if self.element else 0)
        if self.kind == "record":
            return 2 + sum(part.weight for part in self.fields.values())
        return 1

    def __str__(self) -> str:
        if self.kind == "list":
            return f"list of {self.element or 'nothing'}"
        return f"record with {', '.join(self.fields)}" if self.kind == "record" else self.kind


BOOL = Type("bool")
INT = Type("int")


def text(size: int) -> Type:
    return Type("string", size)


def list_of(element: Type | None, size: int) -> Type:
    return Type("list", size, element)


@dataclass(frozen=True)
class Expression:
    """A checked expression. ``source``: what CEL evaluates; ``cost``: its upper bound; ``names``: what it reads."""

    source: str
    cost: int
    names: frozenset[str]


def compile_expression(source: str, context: Mapping[str, Type], result: Type = BOOL) -> Expression:
    """Check ``source`` against the types of its context.

    Raises:
        ExpressionError: it is too long or too deep, does not parse, reads what is not there, uses types wrongly, costs
            more than :data:`MAX_COST`, or is not of type ``result``.
    """
    if len(source) > MAX_SOURCE:
        raise ExpressionError(f"expression of {len(source)} characters; at most {MAX_SOURCE} are allowed: shorten it")
    node = _Parser(source, context).parse()
    if node.type.kind != result.kind:
        raise ExpressionError(f"{_short(source)} is of type {node.type}; it must be {result}")
    if node.cost > MAX_COST:
        raise ExpressionError(
            f"{_short(source)} can cost {node.cost} steps, {MAX_COST} are allowed; drop a comprehension (all and "
            "exists are much cheaper than filter and map) or a regular expression"
        )
    return Expression(node.source, node.cost, node.names)


@dataclass(frozen=True)
class _Node:
    """A checked subexpression. ``strength``: how tightly its operator binds, to know where brackets are needed."""

    source: str
    type: Type
    cost: int
    names: frozenset[str] = frozenset()
    strength: int = 9
    depth: int = 1
    comprehensions: int = 0
    literal: str | None = None
    """Value of a string literal."""

    def inside(self, strength: int) -> str:
        return self.source if self.strength >= strength else f"({self.source})"


_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+)
      | (?P<string>[rR]?(?:"(?:[^"\\\r\n]|\\[^\r\n])*"|'(?:[^'\\\r\n]|\\[^\r\n])*'))
      | (?P<int>[0-9]+(?![0-9A-Za-z_.]))
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<symbol>&&|\|\||[=!<>]=|[-+*/%!<>?:,.()\[\]])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{3})|(.))", re.DOTALL)
_ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"} | {c: c for c in "\\\"'`?"}
_VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,30}")
_RESERVED = frozenset(
    {"as", "break", "const", "continue", "else", "false", "for", "function", "if", "import", "in", "let", "loop"}
    | {"namespace", "null", "package", "return", "true", "var", "void", "while"}
)
_MACROS = ("all", "exists", "exists_one", "filter", "map")
_FUNCTIONS = ("size", "contains", "startsWith", "endsWith", "matches")
_LEVELS = (("||",), ("&&",), ("==", "!=", "<", "<=", ">", ">=", "in"), ("+", "-"), ("*", "/", "%"))
_BINARY = {symbol: strength for strength, symbols in enumerate(_LEVELS, start=2) for symbol in symbols}
"""How tightly each operator binds; ?: is 1, the signs are 7, members and calls 8, what needs no brackets 9."""
_UNARY = 7
_ITERATION = 3
"""Cost of one turn of a comprehension, beside its body."""


class _Parser:
    """Recursive descent over the subset; types and costs are computed while parsing."""

    def __init__(self, source: str, context: Mapping[str, Type]) -> None:
        self._tokens = _tokenise(source)
        self._at = 0
        self._depth = 0
        self._context = context
        self._variables: dict[str, Type] = {}

    def parse(self) -> _Node:
        node = self._expression()
        if self._at < len(self._tokens):
            raise ExpressionError(f"unexpected {self._tokens[self._at][1]!r}; the expression was complete before it")
        return node

    # tokens

    def _peek(self) -> str:
        """The next symbol or name; "" for a literal, or at the end."""
        if self._at < len(self._tokens):
            kind, value = self._tokens[self._at]
            if kind in ("symbol", "name"):
                return value
        return ""

    def _accept(self, *symbols: str) -> str:
        found = self._peek()
        if found not in symbols:
            return ""
        self._at += 1
        return found

    def _expect(self, symbol: str) -> None:
        if not self._accept(symbol):
            found = self._tokens[self._at][1] if self._at < len(self._tokens) else "the end"
            raise ExpressionError(f"{symbol!r} expected, not {_short(found)}")

    def _name(self) -> str:
        if self._at < len(self._tokens) and self._tokens[self._at][0] == "name":
            self._at += 1
            return self._tokens[self._at - 1][1]
        raise ExpressionError(f"a name expected after {self._tokens[self._at - 1][1]!r}")

    # grammar

    def _expression(self) -> _Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ExpressionError(f"nested more than {MAX_DEPTH} deep; flatten the expression")
        condition = self._binary(2)
        if self._accept("?"):
            yes = self._binary(2)
            self._expect(":")
            condition = _conditional(condition, yes, self._expression())
        self._depth -= 1
        return condition

    def _binary(self, level: int) -> _Node:
        if level == _UNARY:
            return self._unary()
        left = self._binary(level + 1)
        symbols = [symbol for symbol, strength in _BINARY.items() if strength == level]
        while symbol := self._accept(*symbols):
            left = _operate(symbol, left, self._binary(level + 1))
        return left

    def _unary(self) -> _Node:
        symbol = self._accept("!", "-")
        if not symbol:
            return self._member()
        if self._peek() in ("!", "-"):
            raise ExpressionError(f"{symbol}{self._peek()}: write one sign at most")
        inner = self._member()
        _require(inner, "bool" if symbol == "!" else "int", f"operand of {symbol}")
        return _node(f"{symbol}{inner.inside(8)}", inner.type, 1, [inner], _UNARY)

    def _member(self) -> _Node:
        node = self._primary()
        while symbol := self._accept(".", "["):
            if symbol == "[":
                index = self._expression()
                self._expect("]")
                node = _select(node, index.literal) if index.literal is not None else _index(node, index)
                continue
            name = self._name()
            if not self._accept("("):
                node = _select(node, name)
            elif name in _MACROS:
                node = self._comprehension(node, name)
            else:
                node = _call(_known(name), [node, *self._arguments()])
        return node

    def _primary(self) -> _Node:
        if self._accept("("):
            node = self._expression()
            self._expect(")")
            return node
        if self._accept("["):
            return _list(self._arguments("]"))
        if self._at >= len(self._tokens):
            raise ExpressionError("the expression ends too early")
        kind, value = self._tokens[self._at]
        self._at += 1
        if kind == "string":
            return _string(value)
        if kind == "int":
            if len(value) > 9:
                raise ExpressionError(f"number {_short(value)}; at most 9 digits are allowed")
            return _Node(str(int(value)), INT, 1)
        if value in ("true", "false"):
            return _Node(value, BOOL, 1)
        if kind == "name" and self._accept("("):
            return _call(_known(value), self._arguments())
        if kind == "name":
            return self._identifier(value)
        raise ExpressionError(f"unexpected {value!r}; a value is expected there")

    def _identifier(self, name: str) -> _Node:
        if name in self._variables:
            return _Node(name, self._variables[name], 1)
        if name in self._context:
            return _Node(name, self._context[name], 1, frozenset([name]))
        raise ExpressionError(f"there is no {_short(name)}; known names are {', '.join(self._context)}")

    def _arguments(self, end: str = ")") -> list[_Node]:
        arguments: list[_Node] = []
        if self._accept(end):
            return arguments
        while True:
            arguments.append(self._expression())
            if not self._accept(","):
                self._expect(end)
                return arguments

    def _comprehension(self, over: _Node, macro: str) -> _Node:
        """``over.macro(name, body)``, behind the opening bracket."""
        _require(over, "list", f"what {macro} runs over")
        name = self._name()
        if not _VARIABLE.fullmatch(name) or name in _RESERVED:
            raise ExpressionError(f"{_short(name)} cannot name a variable; use a letter, as h")
        if name in self._context or name in self._variables:
            raise ExpressionError(f"variable {name} hides another {name}; give it a name of its own")
        self._expect(",")
        element = over.type.element or BOOL
        self._variables[name] = element
        body = self._expression()
        del self._variables[name]
        self._expect(")")
        size = over.type.size
        cost = size * (_ITERATION + body.cost)
        if macro == "map":
            result = list_of(body.type, size)
            cost += size * size // 2 * body.type.weight
        else:
            _require(body, "bool", f"condition of {macro}")
            result = BOOL
            if macro == "filter":
                result = over.type
                cost += size * size // 2 * element.weight
        source = f"{over.inside(8)}.{macro}({name}, {body.source})"
        nested = body.comprehensions + 1
        if nested > MAX_COMPREHENSIONS:
            raise ExpressionError(
                f"{macro} holds {nested - 1} comprehensions within one another; at most {MAX_COMPREHENSIONS} are "
                "allowed, the outer one included"
            )
        # The cost of the body is counted per element above, not once.
        node = _node(source, result, cost, [over, replace(body, cost=0)], 8)
        return replace(node, comprehensions=max(over.comprehensions, nested))


def _node(source: str, type_: Type, cost: int, parts: list[_Node], strength: int = 9) -> _Node:
    """A node over ``parts``; ``cost`` is its own."""
    depth = 1 + max((part.depth for part in parts), default=0)
    if depth > 6 * MAX_DEPTH:  # long chains of one operator lean to the left
        raise ExpressionError(f"an expression of {depth} levels; shorten its chains of operators")
    names: frozenset[str] = frozenset().union(*(part.names for part in parts))
    comprehensions = max((part.comprehensions for part in parts), default=0)
    return _Node(source, type_, cost + sum(part.cost for part in parts), names, strength, depth, comprehensions)


def _operate(symbol: str, left: _Node, right: _Node) -> _Node:
    cost, result = 1, BOOL
    if symbol in ("&&", "||"):
        _require(left, "bool", f"left of {symbol}")
        _require(right, "bool", f"right of {symbol}")
    elif symbol in ("==", "!="):
        _require_same(left.type, right.type, symbol)
        cost += min(left.type.weight, right.type.weight)
    elif symbol == "in":
        _require(right, "list", "right of in")
        if right.type.element:
            _require_same(left.type, right.type.element, "in")
        cost += right.type.size * (1 + left.type.weight) + right.type.weight // 4
    elif symbol == "+" and left.type.kind in ("string", "list"):
        _require_same(left.type, right.type, "+")
        result = replace(_either(left.type, right.type), size=left.type.size + right.type.size)
        cost += result.weight
    else:
        for side, node in (("left", left), ("right", right)):
            _require(node, "int", f"{side} of {symbol}")
        result = INT if symbol in ("+", "-", "*", "/", "%") else BOOL
    level = _BINARY[symbol]
    return _node(f"{left.inside(level)} {symbol} {right.inside(level + 1)}", result, cost, [left, right], level)


def _conditional(condition: _Node, yes: _Node, no: _Node) -> _Node:
    _require(condition, "bool", "left of ?")
    _require_same(yes.type, no.type, "the two sides of :")
    source = f"{condition.inside(2)} ? {yes.inside(2)} : {no.inside(2)}"
    return _node(source, _either(yes.type, no.type), 1, [condition, yes, no], 1)


def _select(node: _Node, name: str) -> _Node:
    if node.type.kind != "record":
        raise ExpressionError(f"{_short(node.source)} is of type {node.type}: it has no field {_short(name)}")
    if name not in node.type.fields:
        raise ExpressionError(f"no field {_short(name)}; {_short(node.source)} has {', '.join(node.type.fields)}")
    return _node(f"{node.inside(8)}.{name}", node.type.fields[name], 1, [node], 8)


def _index(node: _Node, index: _Node) -> _Node:
    _require(node, "list", "what is indexed")
    _require(index, "int", "an index")
    if node.type.element is None:
        raise ExpressionError("an index into the empty list; drop it")
    return _node(f"{node.inside(8)}[{index.source}]", node.type.element, 1, [node, index], 8)


def _list(elements: list[_Node]) -> _Node:
    if len(elements) > MAX_ELEMENTS:
        raise ExpressionError(f"a list of {len(elements)} elements; at most {MAX_ELEMENTS} are allowed")
    element: Type | None = None
    for node in elements:
        if element is not None:
            _require_same(element, node.type, "the elements of a list")
        element = node.type if element is None else _either(element, node.type)
    source = f"[{', '.join(node.source for node in elements)}]"
    result = list_of(element, len(elements))
    return _node(source, result, result.weight, elements)


def _known(function: str) -> str:
    if function not in _FUNCTIONS:
        raise ExpressionError(
            f"function {_short(function)} is not allowed; use {', '.join(_FUNCTIONS)}, or the macros "
            f"{', '.join(_MACROS)}"
        )
    return function


def _call(name: str, arguments: list[_Node]) -> _Node:
    wanted = 1 if name == "size" else 2
    if len(arguments) != wanted:
        raise ExpressionError(f"{name} takes {wanted - 1} argument{'' if wanted == 2 else 's'} behind its subject")
    subject = arguments[0]
    if name == "size":
        if subject.type.kind not in ("string", "list"):
            raise ExpressionError(f"size of {_short(subject.source)}, which is of type {subject.type}; it has none")
        cost = 1 + subject.type.size // 200 if subject.type.kind == "string" else 1
        return _node(f"size({subject.source})", INT, cost, arguments)
    _require(subject, "string", f"subject of {name}")
    _require(arguments[1], "string", f"argument of {name}")
    argument = arguments[1].source
    cost = 1 + subject.type.size // 200
    if name == "matches":
        pattern = arguments[1].literal
        if pattern is None:
            raise ExpressionError("the pattern of matches must be a string literal")
        translated, compiling, states = translate_pattern(pattern)
        argument = _quote(translated)
        cost = compiling + subject.type.size * min(states, 60) // 20
    return _node(f"{subject.inside(8)}.{name}({argument})", BOOL, cost, arguments, 8)


def _string(token: str) -> _Node:
    raw = token[0] in "rR"
    body = token[2:-1] if raw else token[1:-1]
    value = body if raw else _ESCAPE.sub(_unescape, body)
    if len(value) > MAX_TEXT:
        raise ExpressionError(f"a text of {len(value)} characters; at most {MAX_TEXT} are allowed")
    if any((ord(char) < 32 and char not in "\t\n\r") or 0xD800 <= ord(char) < 0xE000 for char in value):
        raise ExpressionError("a text with control characters or half a surrogate pair; drop them")
    return _Node(_quote(value), text(len(value)), 1, literal=value)


def _unescape(match: re.Match[str]) -> str:
    number = match[1] or match[2] or match[3]
    code = int(number, 16) if number else int(match[4], 8) if match[4] else None
    if code is not None:
        if code > 0x10FFFF:
            raise ExpressionError(f"{match[0]} is no character")
        return chr(code)
    if match[5] not in _ESCAPED:
        raise ExpressionError(f"unknown escape {match[0]!r} in a text; write \\\\ for a backslash")
    return _ESCAPED[match[5]]


def _quote(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") + '"'


def _tokenise(source: str) -> list[tuple[str, str]]:
    tokens: list[tuple[str, str]] = []
    at = 0
    while at < len(source):
        match = _TOKEN.match(source, at)
        if match is None:
            raise ExpressionError(f"cannot read {_short(source[at:])} (character {at + 1}); write plain CEL")
        if match.lastgroup != "space":
            tokens.append((match.lastgroup or "", match[0]))
        at = match.end()
    return tokens


def _require(node: _Node, kind: Kind, role: str) -> None:
    if node.type.kind != kind:
        raise ExpressionError(f"{_short(node.source)} ({role}) is of type {node.type}; it must be {kind}")


def _require_same(left: Type, right: Type, where: str) -> None:
    if not _alike(left, right):
        raise ExpressionError(f"{where}: {left} and {right} do not go together")


def _either(left: Type, right: Type) -> Type:
    """The bound of what is ``left`` or ``right``, which are alike."""
    if left.element is None or right.element is None:
        element = left.element or right.element
    else:
        element = _either(left.element, right.element)
    return replace(left, size=max(left.size, right.size), element=element)


def _alike(left: Type, right: Type) -> bool:
    if left.kind != right.kind or left.fields.keys() != right.fields.keys():
        return False
    return left.element is None or right.element is None or _alike(left.element, right.element)


def _short(source: str) -> str:
    return repr(source if len(source) <= 60 else source[:57] + "...")


# Regular expressions. cel evaluates them with Rust's engine, which is linear in the text, but compiles the pattern at
# each evaluation: Unicode classes cost 0.2 ms each, and counted repetitions multiply them.

_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": " \\t\\n\\r"}
_PUNCTUATION = frozenset("\\.+*?()|[]{}^$-/'\"# &~,:;!<>=%@_`")
_SPECIAL = frozenset("\\.+*?()|[]{}^$-&~#")
"""Punctuation that is written with a backslash; the engine refuses some other escapes."""
_COUNT = re.compile(r"\{(\d{1,3})(,(\d{0,3}))?\}")
_LITERAL, _CLASS, _WIDE, _FLAG = 1, 3, 20, 120
"""Costs of a state: a character, a class of ASCII, a dot or negated class (all of Unicode), and of (?i)."""


def translate_pattern(pattern: str) -> tuple[str, int, int]:
    """Check a regular expression and write its Unicode classes as ASCII ones (``\\d`` is ``[0-9]``).

    Allowed are characters, ``.``, classes in brackets, ``\\d \\w \\s`` and their negations, ``\\b``, ``^``, ``$``,
    groups, ``|``, ``* + ? {m,n}`` (lazy or not), and ``(?i)`` at the start.

    Returns:
        the pattern for Rust's engine, the cost of compiling it, and its number of states, repetitions written out.

    Raises:
        ExpressionError: anything else, or more than :data:`MAX_PATTERN` characters or :data:`MAX_STATES` states.
    """
    if len(pattern) > MAX_PATTERN:
        raise ExpressionError(f"a pattern of {len(pattern)} characters; at most {MAX_PATTERN} are allowed")
    flag = "(?i)" if pattern.startswith("(?i)") else ""
    scanner = _Pattern(pattern, len(flag))
    source, cost, states = scanner.alternatives(0)
    if scanner.at < len(pattern):
        raise ExpressionError(f"pattern {_short(pattern)}: a closing bracket without an opening one")
    if states > MAX_STATES:
        raise ExpressionError(
            f"pattern {_short(pattern)} has {states} states, {MAX_STATES} are allowed; shorten its repetitions"
        )
    return flag + source, 40 + (2 * cost + _FLAG if flag else cost), states


def _escape(char: str) -> str:
    return f"\\{char}" if char in _SPECIAL else char


class _Pattern:
    def __init__(self, pattern: str, at: int) -> None:
        self._pattern = pattern
        self.at = at

    def _fail(self, what: str) -> ExpressionError:
        return ExpressionError(f"pattern {_short(self._pattern)}: {what}")

    def alternatives(self, depth: int) -> tuple[str, int, int]:
        """Up to a closing bracket or the end: (source, cost, states)."""
        if depth > 5:
            raise self._fail("groups nested more than 5 deep; flatten them")
        sources, cost, states = "", 0, 0
        while self.at < len(self._pattern) and self._pattern[self.at] != ")":
            if self._pattern[self.at] == "|":
                self.at += 1
                sources += "|"
                states += 1
                continue
            source, atom_cost, atom_states = self._atom(depth)
            source, times = self._repetition(source)
            sources += source
            cost += atom_cost * times
            states += atom_states * times
        return sources, cost, states

    def _repetition(self, source: str) -> tuple[str, int]:
        """``source`` with the repetition that follows, and how often it is written out."""
        rest = self._pattern[self.at :]
        if rest[:1] in ("*", "+", "?"):
            sign, times = rest[0], 1
        elif match := _COUNT.match(rest):
            sign, times = match[0], max(1, int(match[3] or match[1]) + (match[3] == ""))
            if match[3] and int(match[3]) < int(match[1]):
                raise self._fail(f"{match[0]} counts down")
        else:
            return source, 1
        self.at += len(sign)
        if self._pattern[self.at : self.at + 1] == "?":
            sign += "?"
            self.at += 1
        if self._pattern[self.at : self.at + 1] in ("*", "+", "?", "{"):
            raise self._fail("a repetition of a repetition; use one")
        return source + sign, times

    def _atom(self, depth: int) -> tuple[str, int, int]:
        char = self._pattern[self.at]
        if char == "(":
            self.at += 1
            if self._pattern.startswith("?:", self.at):
                self.at += 2
            elif self._pattern.startswith("?", self.at):
                raise self._fail("only (?:...) and a leading (?i) are allowed of the groups with ?")
            source, cost, states = self.alternatives(depth + 1)
            if self.at >= len(self._pattern):
                raise self._fail("a group is not closed")
            self.at += 1
            return f"(?:{source})", cost + 2, states + 1
        if char == "[":
            return self._bracket()
        if char == "\\":
            return self._escape()
        self.at += 1
        if char == ".":
            return ".", _WIDE, 1
        if char in "^$":
            return char, _LITERAL, 1
        if char in "*+?{":
            raise self._fail(f"nothing before {char} to repeat; write \\{char} for the character")
        return _escape(char), _LITERAL if char.isascii() else _CLASS, 1

    def _escape(self) -> tuple[str, int, int]:
        code = self._pattern[self.at + 1 : self.at + 2]
        self.at += 2
        if code in _CLASSES:
            return f"[{_CLASSES[code]}]", _CLASS, 1
        if code.lower() in _CLASSES and code:
            return f"[^{_CLASSES[code.lower()]}]", _WIDE, 1
        if code == "b":
            return "(?-u:\\b)", _CLASS, 1
        if code in ("n", "t", "r"):
            return f"\\{code}", _LITERAL, 1
        if code and code in _PUNCTUATION:
            return _escape(code), _LITERAL, 1
        raise self._fail(f"\\{code} is not allowed; use \\d \\w \\s \\b or a class in brackets")

    def _bracket(self) -> tuple[str, int, int]:
        """A class, as ``[a-z_]``; what is special within one is written escaped."""
        self.at += 1
        negated = self._pattern.startswith("^", self.at)
        self.at += negated
        source = ""
        while True:
            item, is_class = self._class_item()
            if not item:
                break
            source += item
            if self._pattern.startswith("-", self.at) and not self._pattern.startswith("-]", self.at):
                self.at += 1
                end, end_is_class = self._class_item()
                if is_class or end_is_class or len(item) > 1 or len(end) != 1 or end < item:
                    raise self._fail("a range within brackets that is none; write \\- for the character")
                source += f"-{end}"
        if not source:
            raise self._fail("an empty class in brackets")
        wide = negated or not source.isascii()
        return f"[{'^' if negated else ''}{source}]", _WIDE if wide else _CLASS, 1

    def _class_item(self) -> tuple[str, bool]:
        """One character, or one of \\d \\w \\s (True), within brackets; "" at their end."""
        char = self._pattern[self.at : self.at + 1]
        self.at += 1
        if not char:
            raise self._fail("a class in brackets is not closed")
        if char == "]":
            return "", False
        if char != "\\":
            return _escape(char), False
        code = self._pattern[self.at : self.at + 1]
        self.at += 1
        if code in _CLASSES:
            return _CLASSES[code], True
        if code and code in "ntr":
            return f"\\{code}", False
        if code and code in _PUNCTUATION:
            return _escape(code), False
        raise self._fail(f"\\{code} is not allowed within brackets")
