"""The offline builder: episodes, procedures and principles from trajectories, without any model.

Pure and deterministic. It knows no world: action forms, refusals, what is a search and what matters are all learnt from
the trajectories (:mod:`memory.grammar`, :mod:`memory.lifting`, :mod:`memory.alignment`, :mod:`memory.contrast`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import Field

from memory.alignment import Procedure, align, find, relevant
from memory.conditions import shown
from memory.contrast import ContrastSettings, Finding, Rule, Search
from memory.expressions import ExpressionError
from memory.grammar import ActionGrammar
from memory.harm import HarmJudgement, in_scope, is_bad, judge_harm
from memory.lifting import Event, Run, fit_grammar, learn_refusals, read_runs
from memory.occasions import ANY, Occasions
from memory.phrasing import phrase, trigger
from memory.predicates import compile_predicate
from memory.records import (
    AnyItem,
    EpisodeItem,
    Evidence,
    KeyStep,
    Link,
    MemoryRecordError,
    Predicate,
    PrincipleItem,
    ProcedureItem,
    Record,
    Trajectory,
)


class OfflineSettings(Record):
    """How much is built, and from how much."""

    contrast: ContrastSettings = ContrastSettings()
    key_steps: int = Field(default=10, ge=1)
    """Most key steps of an episode; the last ones stay."""
    obstacles: int = Field(default=4, ge=0)
    procedures_per_type: int = Field(default=3, ge=0)
    min_share: float = Field(default=0.15, gt=0, le=1)
    """Share of the successful episodes of a task type that a procedure must explain."""
    min_successes: int = Field(default=2, ge=1)
    """Successful episodes that it must explain at least."""
    links: int = Field(default=30, ge=1)
    """Most episodes that support (and that contradict) one procedure."""
    min_trigger_rate: float = Field(default=0.005, ge=0, le=1)
    """Share of the actions (in the tasks of its type) that must break a rule for it to become a predicate: a check that
    hardly ever fires can be neither audited nor of much use; the principle stays as advice."""
    evidence: int = Field(default=5, ge=1)
    """Most steps cited for one claim, of each kind."""


@dataclass(frozen=True)
class Built:
    """``items`` are in the order in which a store can take them: episodes, procedures, principles."""

    items: list[AnyItem]
    links: list[Link]
    grammar: ActionGrammar
    judgements: list[HarmJudgement]


def build(
    trajectories: Sequence[Trajectory],
    *,
    grammar: ActionGrammar | None = None,
    round: int = 0,
    settings: OfflineSettings | None = None,
) -> Built:
    """Build levels 1 to 3 from ``trajectories``, all of one world and action grammar.

    Args:
        grammar: the action forms, if they are known already; else they are learnt.
        round: what the items are stamped with.

    Raises:
        MemoryRecordError: trajectories of several worlds or grammars.
    """
    scopes = sorted({(trajectory.world, trajectory.grammar) for trajectory in trajectories})
    if len(scopes) > 1:
        raise MemoryRecordError(f"trajectories: of {scopes[0]} and of {scopes[1]}; build each world and grammar apart")
    unique = list({trajectory.id: trajectory for trajectory in trajectories}.values())
    grammar = grammar or fit_grammar(unique)
    if not unique:
        return Built([], [], grammar, [])
    return _Builder(unique, grammar, round, settings or OfflineSettings()).build()


Typed = dict[str, list[tuple[Procedure, ProcedureItem]]]
"""Task type -> its procedures, and the records made of them."""


class _Builder:
    """One build: gathers items and links, so that a claim that is found twice is one record."""

    def __init__(
        self, trajectories: list[Trajectory], grammar: ActionGrammar, round: int, settings: OfflineSettings
    ) -> None:
        first = trajectories[0]
        self._base: dict[str, Any] = {"world": first.world, "grammar": first.grammar, "round": round}
        self._grammar = grammar
        self._settings = settings
        refusals = learn_refusals(trajectories, grammar)
        self._runs = read_runs(trajectories, grammar, refusals)
        # Where the world flags a refusal, a predicate need not know its text.
        unflagged = {event.result for run in self._runs for event in run.events if event.source.valid is not False}
        self._refusals = tuple(text for text in refusals if text in unflagged)
        self._items: dict[str, AnyItem] = {}
        self._links: dict[str, Link] = {}
        self._episode: dict[str, str] = {}
        """Trajectory id -> id of its episode item."""
        self._judgements: list[HarmJudgement] = []

    def build(self) -> Built:
        for run in self._runs:
            self._add_episode(run)
        search = Search(self._runs, self._settings.contrast)
        findings = search.findings()
        typed: Typed = {}
        for task_type in sorted({run.trajectory.task_type for run in self._runs}):
            typed[task_type] = [
                (procedure, self._add_procedure(procedure))
                for procedure in align(
                    self._runs,
                    task_type,
                    min_share=self._settings.min_share,
                    min_support=self._settings.min_successes,
                    most=self._settings.procedures_per_type,
                )
            ]
        for finding in findings:
            self._add_principle(finding, findings, search, typed)
        items = sorted(self._items.values(), key=lambda item: item.level)
        return Built(items, list(self._links.values()), self._grammar, self._judgements)

    def _link(
        self, lower: str, upper: str, evidence: Iterable[Evidence], relation: Literal["supports", "contradicts"]
    ) -> None:
        cited = tuple(dict.fromkeys(evidence))
        if cited:
            link = Link(lower=lower, upper=upper, relation=relation, evidence=cited)
            self._links[link.id] = link

    # ---- level 1

    def _add_episode(self, run: Run) -> None:
        trajectory = run.trajectory
        if not trajectory.steps:
            return  # nothing happened that could be cited
        key = relevant(run.events, trajectory.goal)[-self._settings.key_steps :]
        outcomes: dict[bool | None, Literal["success", "failure", "unknown"]]
        outcomes = {True: "success", False: "failure", None: "unknown"}
        item = EpisodeItem(
            **self._base,
            task_type=trajectory.task_type,
            trajectory=run.id,
            goal=trajectory.goal or trajectory.task,
            outcome=outcomes[trajectory.success],
            key_steps=tuple(KeyStep(step=event.step, what=_happened(event)) for event in key),
            obstacles=tuple(self._obstacles(run)),
        )
        evidence = [_cite(run, event) for event in key or run.events[-1:]]
        if not evidence:  # no step held an action
            evidence = [Evidence(trajectory=run.id, step=trajectory.steps[-1].index)]
        self._items[item.id] = item
        self._episode[run.id] = item.id
        self._link(run.id, item.id, evidence, "supports")

    def _obstacles(self, run: Run) -> list[str]:
        refused = Counter(event.action for event in run.events if event.refused)
        idle = Counter(event.action for event in run.events if not event.refused and not event.changed)
        silent = sum(step.action is None for step in run.trajectory.steps)
        said = [f"{silent} of {len(run.trajectory.steps)} replies held no action"] if silent else []
        said += [f"`{action}` was refused{f' {n} times' if n > 1 else ''}" for action, n in refused.most_common()]
        said += [f"`{action}` was repeated {n} times without effect" for action, n in idle.most_common() if n > 1]
        return said[: self._settings.obstacles]

    # ---- level 2

    def _add_procedure(self, procedure: Procedure) -> ProcedureItem:
        """Without pitfalls: they are principles, which are judged, and shown only while they stand."""
        of_type = f"the task is of type {procedure.task_type}" if procedure.task_type else "the task"
        item = ProcedureItem(
            **self._base,
            task_type=procedure.task_type,
            when=f'{of_type}, as "{procedure.goal}"' if procedure.goal else of_type,
            steps=procedure.steps,
        )
        self._items[item.id] = item
        for match in procedure.matches[: self._settings.links]:
            cited = dict.fromkeys(match.events)
            self._link(self._episode[match.run.id], item.id, (_cite(match.run, event) for event in cited), "supports")
        failed = [run for run in self._runs if run.success is False and run.trajectory.task_type == item.task_type]
        against = 0
        for run in failed:
            occurrence = find(procedure.sequence, run.events)
            if occurrence is not None and against < self._settings.links:
                against += 1
                cited = dict.fromkeys(occurrence[0])
                self._link(self._episode[run.id], item.id, (_cite(run, event) for event in cited), "contradicts")
        return item

    def _skill(self, finding: Finding, findings: Sequence[Finding], search: Search) -> ProcedureItem | None:
        """How the action of a rule is played well: what it needs, in the usual order, then the action itself.

        None where no episode shows it.
        """
        rule = finding.rule
        at = search.occasions[rule.verb]
        same = [
            f for f in findings if (f.rule.verb, f.rule.bad, f.rule.task_type) == (rule.verb, rule.bad, rule.task_type)
        ]
        kept = in_scope(rule, at, search.runs) & ~at.refused & ~is_bad(rule, at, search.runs)
        needs = [f.rule.requirement for f in same if f.rule.requirement.positive and f.rule.requirement.columns]
        needs = list({need.columns[0]: need for need in needs if need.columns[0][0] != rule.verb}.values())
        needs = [need for need in needs if need.columns[0][1] != ANY]
        for need in needs:
            kept &= need.holds(at)
        examples = np.flatnonzero(kept)
        if not len(examples):
            return None
        before = {need: at.last[examples, at.column[need.columns[0]]].mean() for need in needs}
        needs.sort(key=lambda need: (before[need], repr(need)))
        item = ProcedureItem(
            **self._base,
            task_type=rule.task_type,
            when=f"you want to `{rule.verb}`",
            steps=(*(shown(need.columns[0]) for need in needs), rule.verb),
        )
        self._items[item.id] = item
        for n in _one_per_run(examples, at)[: self._settings.links]:
            run = search.runs[at.runs[n]]
            events = [run.events[at.last[n, at.column[need.columns[0]]]] for need in needs]
            cited = (_cite(run, event) for event in [*events, at.events[n]])
            self._link(self._episode[run.id], item.id, cited, "supports")
        return item

    def _recovery(self) -> ProcedureItem | None:
        """What was done when an action had been refused: the form that was taken next in most episodes."""
        pairs: dict[str, list[tuple[Run, Event, Event]]] = {}
        for run in self._runs:
            for before, after in zip(run.events, run.events[1:], strict=False):
                if before.refused and after.changed:
                    pairs.setdefault(after.verb, []).append((run, before, after))
        if not pairs:
            return None
        verb = min(pairs, key=lambda verb: (-len({run.id for run, _, _ in pairs[verb]}), verb))
        item = ProcedureItem(**self._base, when="an action was refused", steps=(verb,))
        self._items[item.id] = item
        for run, before, after in list({pair[0].id: pair for pair in pairs[verb]}.values())[: self._settings.links]:
            self._link(self._episode[run.id], item.id, [_cite(run, before), _cite(run, after)], "supports")
        return item

    # ---- level 3

    def _add_principle(
        self,
        finding: Finding,
        findings: Sequence[Finding],
        search: Search,
        typed: Typed,
    ) -> None:
        rule = finding.rule
        at = search.occasions[rule.verb]
        lower: Sequence[ProcedureItem | None]
        if rule.verb:
            # A rule that needs an action is shown by how the two are played; another by where it can be broken.
            within = [] if _needs(rule) else _containing(rule, typed)[:_PARENTS]
            lower = within or [self._skill(finding, findings, search)]
        elif rule.requirement.name == "form" and rule.bad == "failed":
            with_it = set(rule.requirement.forms)
            scope = [rule.task_type] if rule.task_type else list(typed)
            lower = [
                item
                for one in scope
                for procedure, item in typed[one]
                if with_it.isdisjoint(verb for verb, _ in procedure.sequence)
            ][:_PARENTS]
        else:
            lower = [self._recovery()]
        supporting = [item for item in lower if item is not None]
        if not supporting:
            return
        broken, kept = finding.broken, finding.kept
        bad = is_bad(rule, at, search.runs)
        cited = self._cites(broken[bad[broken]], at, search)
        verdict = judge_harm(finding, at, search, cited)
        phrases = phrase(finding, at, self._base["world"])
        item = PrincipleItem(
            **self._base,
            task_type=rule.task_type,
            condition=phrases.condition,
            guidance=phrases.guidance,
            expected_effect=phrases.expected_effect,
            mechanism=phrases.mechanism,
            scope=phrases.scope,
            exceptions=phrases.exceptions,
            predicate=self._predicate(rule) if self._enforced(verdict) else None,
        )
        self._items[item.id] = item
        self._judgements.append(HarmJudgement(item.id, verdict))
        evidence = [*cited, *self._cites(kept[~bad[kept]], at, search)]
        for procedure in supporting:
            self._link(procedure.id, item.id, evidence, "supports")
        self._link(supporting[0].id, item.id, self._cites(broken[~bad[broken]], at, search), "contradicts")

    def _cites(self, occasions: np.ndarray, at: Occasions, search: Search) -> list[Evidence]:
        """One occasion per episode, each cited by the answer to it."""
        chosen = _one_per_run(occasions, at)[: self._settings.evidence]
        return [_cite(search.runs[at.runs[n]], at.events[n], answer=True) for n in chosen]

    def _enforced(self, verdict: dict[str, Any]) -> bool:
        return verdict["harmful"] and verdict["violations_per_action"] >= self._settings.min_trigger_rate

    def _predicate(self, rule: Rule) -> Predicate | None:
        """The rule in CEL; None where that would cost too much."""
        kept = [condition.cel(self._refusals) for condition in (rule.requirement, *rule.exceptions)]
        requirement = kept[0] if len(kept) == 1 else " || ".join(f"({one})" for one in kept)
        predicate = Predicate(trigger=trigger(rule), requirement=requirement)
        try:
            compile_predicate(predicate)
        except ExpressionError:
            return None
        return predicate


_PARENTS = 3
"""Most procedures that one principle rests on."""


def _needs(rule: Rule) -> bool:
    """Whether the rule asks for an earlier action."""
    return rule.requirement.positive and bool(rule.requirement.columns)


def _containing(rule: Rule, typed: Typed) -> list[ProcedureItem]:
    """The procedures in the rule's scope that play its action, those with most successful episodes first."""
    found = [
        (procedure, item)
        for task_type, pairs in typed.items()
        for procedure, item in pairs
        if rule.task_type in ("", task_type) and rule.verb in {verb for verb, _ in procedure.sequence}
    ]
    return [item for _, item in sorted(found, key=lambda pair: (-len(pair[0].matches), pair[1].id))]


def _one_per_run(occasions: np.ndarray, at: Occasions) -> list[int]:
    """The first of ``occasions`` in each run, in order."""
    _, first = np.unique(at.run[occasions], return_index=True)
    return [int(n) for n in occasions[first]]


def _cite(run: Run, event: Event, *, answer: bool = False) -> Evidence:
    """The step of ``event``, quoted by its action or by the beginning of the world's answer."""
    said = event.result.strip().split("\n")[0][:120] if answer else ""
    return Evidence(trajectory=run.id, step=event.step, quote=said or event.action)


def _happened(event: Event) -> str:
    line = " ".join(event.result.split())
    return f"{event.action}: {line if len(line) <= 80 else line[:79] + '…'}"
