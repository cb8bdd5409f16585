"""The audit of a whole memory: which principles are audited, on which trajectories, and what is written down."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from memory.audit import audit
from memory.audit_checks import Audit
from memory.grammar import ActionGrammar
from memory.lifting import GRAMMAR_TRAJECTORIES, fit_grammar, learn_refusals, read_runs
from memory.predicates import PredicateHost
from memory.records import PrincipleItem, Status, Trajectory
from memory.settings import AuditSettings
from memory.store import Store, Stored


@dataclass(frozen=True)
class Audited:
    """A principle's audit, and what became of its status."""

    stored: Stored
    audit: Audit
    status: Status


def audit_store(
    store: Store,
    host: PredicateHost,
    settings: AuditSettings | None = None,
    *,
    round: int = 0,
    world: str | None = None,
    grammar: str | None = None,
) -> list[Audited]:
    """Audit the principles that have a predicate and are in use, on the trajectories of their world and grammar.

    Each verdict becomes a judgement. A candidate that passes is ``audited``; one that fails is ``rejected``, whether it
    was a candidate or audited; one whose evidence is wanting stays what it was. A validated principle keeps its status,
    since its words have helped; its predicate blocks only where its newest audit passed (:mod:`memory.guide`).
    """
    settings = settings or AuditSettings()
    scopes: dict[tuple[str, str], list[Stored]] = defaultdict(list)
    for stored in store.items(3, statuses=["candidate", "audited", "validated"], world=world, grammar=grammar):
        if isinstance(stored.item, PrincipleItem) and stored.item.predicate is not None:
            scopes[stored.item.world, stored.item.grammar].append(stored)
    done = []
    for (in_world, in_grammar), group in scopes.items():
        # The same words as those that a guide parses actions by.
        forms = fit_grammar(list(islice(store.trajectories(grammar=in_grammar), GRAMMAR_TRAJECTORIES)))
        newest = deque(store.trajectories(world=in_world, grammar=in_grammar), maxlen=settings.trajectories)
        principles = {stored.id: stored.item for stored in group if isinstance(stored.item, PrincipleItem)}
        audits = audit(principles, newest, forms.parse, host, settings, changing_steps(newest, forms))
        for stored in group:
            done.append(_record(store, stored, audits[stored.id], round))
    return done


def changing_steps(trajectories: Sequence[Trajectory], grammar: ActionGrammar) -> dict[str, set[int]]:
    """Of each trajectory's id, the indices of the steps that the world took and that brought an answer not seen yet.

    Worlds that do not flag refusals have their refusing texts learnt (:func:`memory.lifting.learn_refusals`).
    """
    runs = read_runs(trajectories, grammar, learn_refusals(trajectories, grammar))
    return {run.id: {event.step for event in run.events if event.changed} for run in runs}


def _record(store: Store, stored: Stored, found: Audit, round: int) -> Audited:
    store.judge(stored.id, "audit", found.record(), round)
    status = stored.status
    if found.decision == "passed" and status == "candidate":
        status = "audited"
        store.set_status(stored.id, status, f"audit: passed on {found.steps} steps", round)
    elif found.decision == "failed" and status in ("candidate", "audited"):
        status = "rejected"
        store.set_status(stored.id, status, f"audit: {found.reason}", round)
    return Audited(stored, found, status)
