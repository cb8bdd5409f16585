"""ALFWorld's text engine, light and fast: fast-downward's state machine, TextWorld's grammar, ALFWorld's object names.

It plays the same games as the stock stack (TextWorld's ``PddlEnv`` under ALFWorld's ``AlfredDemangler``) and gives the
same observations, admissible commands and wins. It is faster because nothing is computed twice: a PDDL problem is
translated once per process instead of twice per reset (the second translation serves the planner expert only, which is
not used here), the grammar is parsed once instead of at every use, facts are sorted once per change instead of at every
query, and contexts are passed on instead of deep-copied. It patches nothing: a stock engine in the same process stays
stock. Grammar expressions of a game file are interpreted (names, attributes, ``+``, ``or``), never evaluated as Python.

Not thread safe (fast-downward's translator and TextWorld's parsers keep global state); many engines in one thread are
fine. Each playing engine holds a copy of fast-downward's library (5 MB); the process remembers ``GAMES_KEPT`` games.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib.metadata
import json
import os
import re
import sys
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import fast_downward
from textworld.envs.pddl import logic as pddl_logic
from textworld.envs.pddl import textgen
from textworld.logic import Rule, Type, TypeHierarchy

from envs.base import EnvFault, TaskError

_data_variable = os.environ.get("ALFWORLD_DATA")
from alfworld.agents.utils.misc import Demangler  # noqa: E402

if _data_variable is None:
    # The import sets the variable to a folder of its own, which would hide that the user named none.
    os.environ.pop("ALFWORLD_DATA", None)

INVALID = "Nothing happens."
"""The engine's answer to a command that is not admissible."""

GAMES_KEPT = 64
"""Translated games that a process remembers."""

Variable = tuple[str, str]
"""(name, type) of an object."""
Placeholder = tuple[str, str]
"""(name, type) of a parameter of an action or of a query."""
Mapping = dict[Placeholder, Variable]
Fact = tuple[str, tuple[Variable, ...]]
"""(predicate, arguments); ``not_`` before the predicate for a negated one. Sorts as TextWorld's Proposition does."""
Query = tuple[tuple[str, tuple[Placeholder, ...]], ...]
"""A conjunction of predicates over placeholders."""


_idle_libraries: list[Any] = []
"""Copies of fast-downward's library that no engine uses now. They are used again, never unloaded: glibc shares some
symbols among copies of a C++ library, and after several are closed the next one to be opened crashes the process."""


class AlfworldEngine:
    """One game at a time: ``load`` a file, ``reset``, ``step``.

    ``won``, ``admissible`` (sorted, without duplicates) and ``walkthrough`` (a stored winning plan, which knows where
    things are; empty when the file has none) describe the present situation.

    Args:
        cache: a folder that keeps translated games (about 60 kB each) for later processes; None: keep them in memory
            only, which suits games that are played once.

    Raises:
        TaskError: ``load`` of a file that is missing or not a ``game.tw-pddl``; a cache that cannot be written.
        EnvFault: use out of order, or a game that the simulator cannot play.
    """

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache
        self._lib: Any = _idle_libraries.pop() if _idle_libraries else fast_downward.load_lib()
        self._game: _Game | None = None
        self._facts: _Facts | None = None
        self._commands: dict[str, _Operator] | None = None
        self._won = False
        self._walkthrough: list[str] = []

    def load(self, game_file: Path) -> None:
        self._game = self._facts = self._commands = None
        data = _read(game_file)
        self._walkthrough = list(data.get("walkthrough") or [])
        try:
            self._game = _game(self._lib, data["pddl_domain"], data["pddl_problem"], data["grammar"], self._cache)
        except TaskError:
            raise
        except Exception as error:
            raise EnvFault(f"{game_file}: the engine cannot load this game: {error!r}") from error

    def reset(self) -> str:
        """Start the loaded game from its beginning and return the first observation (banner, room, task)."""
        if self._game is None:
            raise EnvFault("reset: no game is loaded; call load first")
        problem = self._game.problem
        self._lib.load_sas(zlib.decompress(problem.sas))
        self._facts = _Facts(self._game.types, problem.start)
        self._changed()
        return _text(self._game, self._facts, _symbols("#intro#"), {})

    def step(self, action: str) -> str:
        """Play one command. One that is not admissible changes nothing and is answered ``Nothing happens.``"""
        game, facts = self._running()
        operator = self._operators().get(action.strip())
        if operator is None:
            return INVALID
        effects = (fast_downward.Atom * operator.effects)()
        self._lib.apply_operator(operator.id, effects)
        for effect in effects:
            facts.apply(_fact(effect.name, game.problem.objects))
        self._changed()
        return _text(game, facts, game.feedback[operator.action], operator.mapping)

    @property
    def won(self) -> bool:
        return self._won

    @property
    def admissible(self) -> list[str]:
        return sorted(self._operators())

    @property
    def inventory(self) -> list[str]:
        """Names of what the agent holds, sorted."""
        game, facts = self._running()
        return sorted(game.entities[held].name for _, (held, _) in facts.pairs("holds"))

    @property
    def walkthrough(self) -> list[str]:
        return list(self._walkthrough)

    def close(self) -> None:
        """Give the simulator back. May be called twice; the engine is of no use afterwards."""
        if self._lib is not None:
            _idle_libraries.append(self._lib)
        self._lib = self._game = self._facts = self._commands = None

    def _running(self) -> tuple[_Game, _Facts]:
        if self._game is None or self._facts is None:
            raise EnvFault("the game is not running; call load and reset first")
        return self._game, self._facts

    def _changed(self) -> None:
        self._commands = None
        self._won = self._lib.check_goal()

    def _operators(self) -> dict[str, _Operator]:
        """Command -> the first applicable operator of that text, found when first asked for in a situation."""
        if self._commands is None:
            game, facts = self._running()
            found = (fast_downward.Operator * self._lib.get_applicable_operators_count())()
            self._lib.get_applicable_operators(found)
            self._commands = {}
            for operator in found:
                command, action, mapping = _command(game, facts, operator.name)
                self._commands.setdefault(command, _Operator(operator.id, operator.nb_effect_atoms, action, mapping))
        return self._commands


@dataclass(frozen=True)
class _Operator:
    """An applicable ground action: fast-downward's number for it, how many atoms it changes, and its arguments."""

    id: int
    effects: int
    action: str
    mapping: Mapping


@dataclass(frozen=True)
class _Entity:
    """An object as the grammar sees it (TextWorld's EntityInfo)."""

    id: str
    name: str
    definite: str = "the"
    indefinite: str = "a"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class _ProductionRule:
    condition: Query
    symbols: tuple[Any, ...]


@dataclass(frozen=True)
class _Problem:
    """What a translated PDDL problem is to us: all that need not be computed again."""

    sas: bytes
    """fast-downward's planning task, compressed (a kitchen: 1.3 MB -> 60 kB)."""
    types: dict[str, list[str]]
    """Type -> its supertypes."""
    objects: dict[str, str]
    """Object -> its type."""
    parameters: dict[str, tuple[Placeholder, ...]]
    """Action -> its parameters."""
    fluents: frozenset[str]
    """The predicates that actions change."""
    start: tuple[Fact, ...]
    """The facts at the beginning, sorted."""


@dataclass(frozen=True)
class _Game:
    """Everything that stays the same over all episodes of a game."""

    problem: _Problem
    types: TypeHierarchy
    entities: dict[str, _Entity]
    rules: dict[str, tuple[_ProductionRule, ...]]
    templates: dict[str, tuple[Any, ...]]
    """Action -> symbols of its command."""
    feedback: dict[str, tuple[Any, ...]]
    """Action -> symbols of the answer to it."""
    commands: dict[str, tuple[str, str, Mapping]] = field(default_factory=dict)
    """Operator -> (command, action, mapping), for the commands whose text no action can change."""


# ---- Loading


def _read(game_file: Path) -> dict[str, Any]:
    try:
        data = json.loads(game_file.read_text())
    except OSError as error:
        raise TaskError(f"game file {game_file}: {error.strerror or error}; give the path of a game.tw-pddl") from None
    except ValueError as error:
        raise TaskError(f"game file {game_file}: not JSON ({error}); fetch the data again") from None
    missing = {"pddl_domain", "pddl_problem", "grammar"} - set(data if isinstance(data, dict) else ())
    if missing:
        raise TaskError(f"game file {game_file}: no {', '.join(sorted(missing))} in it; give a game.tw-pddl")
    return data


_games: OrderedDict[bytes, _Game] = OrderedDict()


def _game(lib: Any, domain: str, problem: str, grammar: str, cache: Path | None) -> _Game:
    """The game of these texts, from this process's memory where it was loaded lately."""
    key = hashlib.sha256("\0".join((domain, problem, grammar)).encode()).digest()
    if key not in _games:
        _games[key] = _build(_problem(lib, domain, problem, cache), grammar)
        if len(_games) > GAMES_KEPT:
            _games.popitem(last=False)
    _games.move_to_end(key)
    return _games[key]


def _build(problem: _Problem, grammar: str) -> _Game:
    types = TypeHierarchy()
    for name, supertypes in problem.types.items():
        types.add(Type(name, supertypes))
    entities = {name: _Entity(name, name) for _, arguments in problem.start for name, _ in arguments}
    names = Demangler(game_infos=entities)
    actions, rules = _grammar(grammar)
    return _Game(
        problem=problem,
        types=types,
        entities={name: _Entity(name, names.demangle_alfred_name(name)) for name in entities},
        rules=rules,
        templates={name: _symbols(action.template) for name, action in actions.items()},
        feedback={name: _symbols(action.feedback_rule) for name, action in actions.items()},
    )


def _problem(lib: Any, domain: str, problem: str, cache: Path | None) -> _Problem:
    """Translate, or read what an earlier process translated."""
    if cache is None:
        return _translated(lib, domain, problem)
    version = importlib.metadata.version("fast-downward-textworld")
    key = hashlib.sha256("\0".join((str(_STORED_FORMAT), version, domain, problem)).encode()).hexdigest()
    path = cache / f"{key}.game"
    if path.is_file():
        return _from_bytes(path.read_bytes())
    result = _translated(lib, domain, problem)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache, suffix=".part", delete=False) as file:
            file.write(_to_bytes(result))
        os.replace(file.name, path)  # whole or not at all, whatever other processes do at the same time
    except OSError as error:
        raise TaskError(f"cache {cache}: {error.strerror or error}; set SAGA_CACHE to a folder that can grow") from None
    return result


def _translated(lib: Any, domain: str, problem: str) -> _Problem:
    task, sas = _translate(domain, problem)
    objects = {item.name: item.type_name for item in task.objects}
    lib.load_sas(sas)
    atoms = (fast_downward.Atom * lib.get_state_size())()
    lib.get_state(atoms)
    state = [_fact(atom.name, objects) for atom in atoms]
    start = {*_initial_facts(task, objects), *(fact for fact in state if not fact[0].startswith("not_"))}
    return _Problem(
        sas=zlib.compress(sas, 1),
        types={item.name: item.supertype_names for item in reversed(task.types)},  # the first of two of a name counts
        objects=objects,
        parameters={
            action.name: tuple((item.name.strip("?"), item.type_name) for item in action.parameters)
            for action in task.actions
        },
        fluents=frozenset(
            [effect.literal.predicate for action in task.actions for effect in action.effects]
            + [axiom.name for axiom in task.axioms]
        ),
        start=tuple(sorted(start)),
    )


_STORED_FORMAT = 1


def _to_bytes(problem: _Problem) -> bytes:
    fields = {
        "types": problem.types,
        "objects": problem.objects,
        "parameters": problem.parameters,
        "fluents": sorted(problem.fluents),
        "start": problem.start,
    }
    return zlib.compress(json.dumps(fields).encode()) + problem.sas


def _from_bytes(data: bytes) -> _Problem:
    head = zlib.decompressobj()
    fields = json.loads(head.decompress(data))
    return _Problem(
        sas=head.unused_data,
        types=fields["types"],
        objects=fields["objects"],
        parameters={name: tuple(map(tuple, items)) for name, items in fields["parameters"].items()},
        fluents=frozenset(fields["fluents"]),
        start=tuple((predicate, tuple(map(tuple, arguments))) for predicate, arguments in fields["start"]),
    )


def _translate(domain: str, problem: str) -> tuple[Any, bytes]:
    """(parsed task, planning task in SAS format). The translator overwrites ``sys.argv``; it is put back.

    The translator allocates a few hundred thousand objects that all live to its end: a third of its time is garbage
    collection that finds nothing, so that is off meanwhile.
    """
    argv, collecting = sys.argv, gc.isenabled()
    gc.disable()
    try:
        task, sas = fast_downward.pddl2sas(domain, problem)
    finally:
        sys.argv = argv
        if collecting:
            gc.enable()
    return task, sas.encode()


def _initial_facts(task: Any, objects: dict[str, str]) -> Iterator[Fact]:
    """The facts of the problem's ``:init`` that TextWorld keeps: no equalities, costs or distances."""
    conditions, expressions = fast_downward.translate.pddl.conditions, fast_downward.translate.pddl.f_expression
    for item in task.init:
        if isinstance(item, conditions.Atom) and item.predicate != "=":
            yield item.predicate, tuple((name, objects[name]) for name in item.args)
        elif isinstance(item, expressions.Assign) and item.fluent.symbol != "total-cost":
            value = str(item.expression.value)
            if not value.isdigit():
                yield value, tuple((name, objects[name]) for name in item.fluent.args)


def _fact(atom: str, objects: dict[str, str]) -> Fact:
    """``"NegatedAtom opened(drawer_1)"`` -> ``("not_opened", (("drawer_1", "receptacle"),))``."""
    sign, rest = atom.split(" ", 1)
    predicate, arguments = rest[:-1].split("(", 1)
    return (
        "not_" + predicate if sign == "NegatedAtom" else predicate,
        tuple((name, objects[name]) for name in arguments.split(", ") if name),
    )


# ---- Facts


class _Facts:
    """The facts of a running game and the queries over them, with the meaning and order of TextWorld's State."""

    def __init__(self, types: TypeHierarchy, facts: Iterable[Fact]) -> None:
        self._types = types
        self._facts: dict[str, dict[tuple[str, ...], set[tuple[Variable, ...]]]] = {}
        self._sorted: dict[str, dict[tuple[str, ...], list[tuple[Variable, ...]]]] = {}
        for fact in facts:
            self._group(fact).add(fact[1])

    def apply(self, effect: Fact) -> None:
        """Make ``effect`` true and its negation false."""
        predicate, arguments = effect
        opposite = predicate.removeprefix("not_") if predicate.startswith("not_") else "not_" + predicate
        self._group((opposite, arguments)).discard(arguments)
        self._group(effect).add(arguments)
        self._sorted.pop(predicate, None)
        self._sorted.pop(opposite, None)

    def pairs(self, predicate: str) -> Iterator[tuple[Variable, Variable]]:
        """The arguments of the facts of a predicate that has two."""
        for group in self._facts.get(predicate, {}).values():
            yield from ((first, second) for first, second in group)

    def assignments(self, query: Query, mapping: Mapping) -> Iterator[Mapping]:
        """All extensions of ``mapping`` that satisfy ``query``. Distinct placeholders take distinct objects."""
        if not query:
            yield mapping
            return
        (predicate, placeholders), rest = query[0], query[1:]
        for arguments in self._matching(predicate, tuple(type_ for _, type_ in placeholders)):
            extended = dict(mapping)
            for placeholder, variable in zip(placeholders, arguments, strict=False):
                bound = extended.get(placeholder)
                if bound is None:
                    if variable in extended.values():
                        break
                    extended[placeholder] = variable
                elif bound != variable:
                    break
            else:
                yield from self.assignments(rest, extended)

    def _matching(self, predicate: str, types: tuple[str, ...]) -> list[tuple[Variable, ...]]:
        """Arguments of the facts of ``predicate`` over ``types`` and their subtypes: subtype by subtype, sorted."""
        known = self._sorted.setdefault(predicate, {})
        if types not in known:
            groups = self._facts.get(predicate, {})
            known[types] = [
                arguments
                for subtypes in self._types.multi_subtypes([self._types.get(name) for name in types])
                for arguments in sorted(groups.get(tuple(item.name for item in subtypes), ()))
            ]
        return known[types]

    def _group(self, fact: Fact) -> set[tuple[Variable, ...]]:
        predicate, arguments = fact
        return self._facts.setdefault(predicate, {}).setdefault(tuple(type_ for _, type_ in arguments), set())


# ---- Text


_GOAL = re.compile(r'(?<="Your task is to: )[A-Za-z0-9 ,\'-]+(?=\.")')
_ANY_GOAL = "ANY GOAL"


def _grammar(text: str) -> tuple[dict[str, Any], dict[str, tuple[_ProductionRule, ...]]]:
    """(actions by lower-case name, production rules). Official games differ in the goal's words only: parse once."""
    goals = _GOAL.findall(text)
    if len(goals) != 1:
        return _document(text)
    actions, rules = _document(_GOAL.sub(_ANY_GOAL, text))
    task = tuple(
        _ProductionRule(rule.condition, tuple(_with_goal(symbol, goals[0]) for symbol in rule.symbols))
        for rule in rules.get("task", ())
    )
    return actions, {**rules, "task": task}


def _with_goal(symbol: Any, goal: str) -> Any:
    if isinstance(symbol, textgen.TerminalSymbol):
        return textgen.TerminalSymbol(symbol.symbol.replace(_ANY_GOAL, goal))
    return symbol


@lru_cache(maxsize=8)
def _document(text: str) -> tuple[dict[str, Any], dict[str, tuple[_ProductionRule, ...]]]:
    actions, grammar = pddl_logic._parse_and_convert(text, rule_name="pddlStart")
    rules = {
        name: tuple(_ProductionRule(_query(rule.condition), tuple(rule.rhs)) for rule in rules)
        for name, rules in grammar._rules.items()
    }
    return actions, rules


@cache
def _symbols(text: str) -> tuple[Any, ...]:
    return tuple(textgen._parse_and_convert(text, rule_name="symbols"))


@cache
def _query(text: str) -> Query:
    if not text:
        return ()
    return tuple(
        (item.name, tuple((placeholder.name, placeholder.type) for placeholder in item.parameters))
        for item in Rule.parse_conjunctive_query(text).preconditions
    )


def _command(game: _Game, facts: _Facts, operator: str) -> tuple[str, str, Mapping]:
    """``"openobject agent1 drawer_1 …"`` -> (its command, action, mapping from parameters to objects)."""
    known = game.commands.get(operator)
    if known is not None:
        return known
    action, *arguments = operator.split()
    parameters = game.problem.parameters[action]
    mapping = {item: (name, item[1]) for item, name in zip(parameters, arguments, strict=False)}
    template = game.templates[action]
    entry = (_text(game, facts, template, mapping), action, mapping)
    if _constant(template, game.problem.fluents):
        game.commands[operator] = entry
    return entry


def _constant(symbols: Sequence[Any], fluents: frozenset[str]) -> bool:
    """Whether no action can change the text of ``symbols``: no production rules, no queries over fluents."""
    for symbol in symbols:
        if isinstance(symbol, textgen.NonterminalSymbol):
            return False
        if isinstance(symbol, textgen.ListSymbol) and not _constant([symbol.symbol], fluents):
            return False
        if isinstance(symbol, textgen.ConditionalSymbol):
            predicates = {predicate.removeprefix("not_") for predicate, _ in _query(symbol.given or "")}
            if predicates & fluents or not _constant([symbol.expression], fluents):
                return False
    return True


def _text(game: _Game, facts: _Facts, symbols: Sequence[Any], mapping: Mapping) -> str:
    """Derive ``symbols`` in the context of ``mapping``: TextWorld's context-sensitive grammar, without its copies."""
    return "".join(part for symbol in symbols for part in _parts(game, facts, symbol, mapping))


def _parts(game: _Game, facts: _Facts, symbol: Any, mapping: Mapping) -> list[str]:
    if isinstance(symbol, textgen.TerminalSymbol):
        return [symbol.symbol]
    if isinstance(symbol, textgen.NonterminalSymbol):
        return [_production(game, facts, symbol.symbol, mapping)]
    if isinstance(symbol, textgen.EvalSymbol):
        scope = {name: game.entities[variable] for (name, _), (variable, _) in mapping.items()}
        return [str(_value(_expression(symbol.expression), scope))]
    if isinstance(symbol, textgen.ConditionalSymbol):
        return [
            _text(game, facts, [symbol.expression], assignment)
            for assignment in facts.assignments(_query(symbol.given or ""), mapping)
        ]
    if isinstance(symbol, textgen.ListSymbol):
        return [_enumeration(game, facts, _parts(game, facts, symbol.symbol, mapping), mapping)]
    raise EnvFault(f"grammar: unknown symbol {symbol!r}")


def _production(game: _Game, facts: _Facts, name: str, mapping: Mapping) -> str:
    """The first production rule of ``name`` whose condition holds."""
    for rule in game.rules.get(name, ()):
        if not rule.condition or next(facts.assignments(rule.condition, mapping), None) is not None:
            return _text(game, facts, rule.symbols, mapping)
    raise EnvFault(f"grammar: no rule for #{name}# applies")


def _enumeration(game: _Game, facts: _Facts, items: list[str], mapping: Mapping) -> str:
    """``a, b, and c`` with the grammar's own words."""
    if not items:
        return _production(game, facts, "list_empty", mapping)
    if len(items) == 1:
        return items[0]
    separator = _production(game, facts, "list_separator", mapping)
    return separator.join(items[:-1]) + _production(game, facts, "list_last_separator", mapping) + items[-1]


@cache
def _expression(text: str) -> ast.expr:
    return ast.parse(text.strip(), mode="eval").body


def _value(node: ast.expr, scope: dict[str, _Entity]) -> Any:
    """The value of a grammar expression such as ``o.indefinite + ' ' + o.name`` or ``r.name or r.id``."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name) if name in scope:
            return scope[name]
        case ast.Attribute(value=ast.Name(id=name), attr="id" | "name" | "definite" | "indefinite" as attribute) if (
            name in scope
        ):
            return getattr(scope[name], attribute)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left, scope) + _value(right, scope)
        case ast.BoolOp(op=ast.Or(), values=values):
            return next((value for item in values if (value := _value(item, scope))), "")
        case _:
            raise EnvFault(f"grammar: cannot interpret the expression {ast.unparse(node)!r}")
