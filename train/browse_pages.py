"""What each page of ``saga browse`` shows: from the store and the run's folder to the values of a template."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

from starlette.requests import Request

from memory.listing import Filter, list_items, list_trajectories, worlds_and_types
from memory.qlearning import Candidate, best_tried
from memory.records import LEVEL_NAMES, Evidence, Link, MemoryRecordError, Status, TraceStep, Trajectory
from memory.samem_store import (
    DEFAULT_NAME,
    KeptThought,
    learnt_from,
    list_states,
    read_barriers,
    read_state,
    read_updates,
    table_names,
)
from memory.store import Judgement, Store, Stored
from memory.usage import Check, Regulation
from train.config import ConfigError
from train.ingest import trajectory_of
from train.memory_show import fields_of, value_text
from train.metrics import failure_class
from train.run_folder import RunFolder, episode_files, phase_of
from train.trajectory import Episode, read_episodes

PAGE = 50
"""Rows of a list on one page."""

LINKS = 20
"""Links of a record on one page."""

UPDATES = 5
"""Newest changes of a thought's value that are shown."""


@dataclass(frozen=True)
class Page:
    """A template of ``train/templates`` and its values."""

    template: str
    values: dict[str, Any]


@dataclass(frozen=True)
class Joined:
    """A record on one level, what joins it to the one shown, and the steps that the link cites."""

    record: Stored | Trajectory
    relation: str
    cited: list[tuple[Evidence, TraceStep]]


@dataclass(frozen=True)
class Attempt:
    """A proposal of a step, what the predicates said of it, and whether it was played."""

    proposal: str | None
    checks: list[Check]
    idle: int
    played: bool


class Browser:
    """The pages of a memory, of a run's episodes, or of both. Methods take the request, for its path and query."""

    def __init__(self, store: Store | None, run: RunFolder | None = None) -> None:
        self._store = store
        self.run = run
        self.has_memory = store is not None
        self.phases = [phase_of(file) for file in _files(run)]
        self.tables = table_names(store) if store else []

    @property
    def store(self) -> Store:
        if self._store is None:
            raise MemoryRecordError("This run has no memory; name one with --store")
        return self._store

    # ---- the memory

    def overview(self, request: Request) -> Page:
        values: dict[str, Any] = {"title": self.run.name if self.run else "Memory"}
        if self._store is not None:
            values |= {"stats": self.store.stats(), "statuses": get_args(Status)}
            values["barriers"] = {name: read_barriers(self.store, name)[-1:] for name in self.tables}
        values["phases"] = [(phase, self._figures(phase)) for phase in self.phases]
        return Page("overview.html", values)

    def items(self, request: Request) -> Page:
        level = request.path_params["level"]
        if level not in (1, 2, 3):
            raise MemoryRecordError(f"There is no level {level}; it is 1, 2 or 3")
        wanted, number = _filter(request), _page_number(request)
        found = list_items(self.store, level, wanted, offset=PAGE * number, limit=PAGE)
        worlds, types = worlds_and_types(self.store, level)
        return Page(
            "items.html",
            {
                "title": f"{LEVEL_NAMES[level].capitalize()}s",
                "level": level,
                "found": found,
                "wanted": wanted,
                "worlds": worlds,
                "types": types,
                "statuses": get_args(Status) if level == 3 else ("candidate", "retired"),
                **_pager(request, found.total, PAGE),
            },
        )

    def trajectories(self, request: Request) -> Page:
        wanted, number = _filter(request), _page_number(request)
        found = list_trajectories(self.store, wanted, offset=PAGE * number, limit=PAGE)
        worlds, types = worlds_and_types(self.store, 0)
        values = {"title": "Trajectories", "found": found, "wanted": wanted, "worlds": worlds, "types": types}
        return Page("trajectories.html", values | _pager(request, found.total, PAGE))

    def record(self, request: Request) -> Page:
        id = request.path_params["id"]
        return self._trajectory(id) if id.startswith("t-") else self._item(id, request)

    def _item(self, id: str, request: Request) -> Page:
        stored = self.store.item(id)
        number = _page_number(request)
        counts = self.store.count_links([id])[id]
        below = [  # contradicting links first: they are few, and what to look at
            link
            for relation in sorted(counts)
            for link in self.store.links(upper=id, relation=relation, limit=LINKS, offset=LINKS * number)
        ]
        above = self.store.links(lower=id)
        judgements = self.store.judgements(id)
        return Page(
            "item.html",
            {
                "title": f"{LEVEL_NAMES[stored.item.level].capitalize()} {id}",
                "id": id,
                "stored": stored,
                "fields": [(name, value) for name, value in fields_of(stored.item) if value],
                "history": self.store.history(id),
                "judgements": [(judgement, _told(judgement)) for judgement in reversed(judgements)],
                "counts": counts,
                "below": self._joined(below, lambda link: link.lower),
                "above": self._joined(above, lambda link: link.upper),
                **_pager(request, max(counts.values(), default=0), LINKS),
            },
        )

    def _joined(self, links: Sequence[Link], end: Callable[[Link], str]) -> list[Joined]:
        cited = {evidence.trajectory for link in links for evidence in link.evidence}
        records = self.store.find({end(link) for link in links} | cited)
        steps = {
            (record.id, step.index): step
            for record in records.values()
            if isinstance(record, Trajectory)
            for step in record.steps
        }
        return [
            Joined(
                records[end(link)],
                link.relation,
                [(evidence, steps[evidence.trajectory, evidence.step]) for evidence in link.evidence],
            )
            for link in links
        ]

    def _trajectory(self, id: str) -> Page:
        record = self.store.trajectory(id)
        links = self.store.citing(id)
        uppers = self.store.find({link.upper for link in links})
        cited: dict[int, dict[tuple[str, str, str], Stored]] = defaultdict(dict)
        for link in links:
            upper = uppers[link.upper]
            assert isinstance(upper, Stored)  # a link leads to an item: checked when it was written
            for evidence in link.evidence:
                if evidence.trajectory == id:
                    cited[evidence.step][link.upper, link.relation, evidence.quote] = upper
        return Page(
            "trajectory.html",
            {
                "title": f"Trajectory {id}",
                "id": id,
                "record": record,
                "cited": cited,
                "learnt": _by_step(learnt_from(self.store, id)),
                "replay": self._replay(record),
            },
        )

    def _replay(self, record: Trajectory) -> str | None:
        """The id of the run's episode that a trajectory was; None: it is of elsewhere."""
        start = f"run:{self.run.name}/" if self.run else ""
        if not start or not record.source.startswith(start):
            return None
        id = record.source.removeprefix(start)
        return id if id.split("/")[0] in self.phases else None

    # ---- values of thoughts

    def states(self, request: Request) -> Page:
        name = self._table(request)
        words, number = request.query_params.get("words", ""), _page_number(request)
        found = list_states(self.store, name, words, offset=PAGE * number, limit=PAGE)
        values = {"title": "States", "table": name, "found": found, "words": words}
        return Page(
            "states.html", values | {"barriers": read_barriers(self.store, name)} | _pager(request, found.total, PAGE)
        )

    def state(self, request: Request) -> Page:
        name, number = self._table(request), request.path_params["number"]
        founder, thoughts = read_state(self.store, name, number)
        updates = {
            one.number: read_updates(self.store, name=name, thought=one.number, limit=UPDATES)[::-1] for one in thoughts
        }
        return Page(
            "state.html",
            {
                "title": f"State {number}",
                "table": name,
                "number": number,
                "founder": founder,
                "thoughts": thoughts,
                "recalled": _recalled(thoughts),
                "updates": updates,
                "widest": max((abs(one.value) for one in thoughts), default=0.0) or 1.0,
            },
        )

    def _table(self, request: Request) -> str:
        name = request.query_params.get("table", self.table)
        if name not in self.tables:
            raise MemoryRecordError(f"There is no table {name!r} of values; `saga samem learn` makes one")
        return str(name)

    # ---- episodes of the run

    def phase(self, request: Request) -> Page:
        phase = request.path_params["phase"]
        every = self._episodes(phase)
        outcome, task_type = request.query_params.get("outcome", ""), request.query_params.get("task_type", "")
        words = request.query_params.get("words", "")
        found = [
            episode
            for episode in every
            if outcome in ("", _outcome(episode))
            and task_type in ("", episode.task_type)
            and all(word in f"{episode.id} {episode.task} {episode.goal}".lower() for word in words.lower().split())
        ]
        start = PAGE * _page_number(request)
        return Page(
            "phase.html",
            {
                "title": f"Episodes of {phase}",
                "phase": phase,
                "found": [(one, _outcome(one), _objections(one)) for one in found[start : start + PAGE]],
                "total": len(found),
                "outcomes": ("won", "lost", "fault"),
                "outcome": outcome,
                "types": sorted({episode.task_type for episode in every}),
                "task_type": task_type,
                "words": words,
                **_pager(request, len(found), PAGE),
            },
        )

    def episode(self, request: Request) -> Page:
        id = request.path_params["id"]
        every = self._episodes(id.split("/")[0])
        place = next((number for number, one in enumerate(every) if one.id == id), None)
        if place is None:
            raise ConfigError(f"There is no episode {id}")
        episode = every[place]
        kept = self._kept(episode)
        made = {one.item: one for one in episode.memory.instantiations} if episode.memory else {}
        learnt = _by_step(learnt_from(self.store, kept) if kept else [])
        return Page(
            "episode.html",
            {
                "title": f"Episode {id}",
                "episode": episode,
                "outcome": _outcome(episode),
                "failure": failure_class(episode),
                "made": made,
                "attempts": {step.index: _attempts(step.regulation) for step in episode.steps},
                "options": self._options(episode),
                "learnt": learnt,
                "kept": kept,
                "before": every[place - 1].id if place else None,
                "after": every[place + 1].id if place + 1 < len(every) else None,
            },
        )

    def _options(self, episode: Episode) -> dict[int, list[KeptThought]]:
        """Of each step whose state the table knows, the thoughts of that state, as the table has them now."""
        found: dict[int, list[KeptThought]] = {}
        for step in episode.steps:
            if step.recall is not None and step.recall.state is not None and self.table in self.tables:
                try:
                    found[step.index] = read_state(self.store, self.table, step.recall.state)[1]
                except MemoryRecordError:  # played with another table
                    continue
        return found

    @property
    def table(self) -> str:
        """The table of values that is shown unless another one is named: the run's, else the oldest."""
        named = (self.run.config.get("samem") or {}).get("table") if self.run else None
        return str(named or (self.tables[0] if self.tables else DEFAULT_NAME))

    def _kept(self, episode: Episode) -> str | None:
        """The id of the trajectory that the memory holds of an episode; None: it was not taken in."""
        if self._store is None or self.run is None:
            return None
        id = trajectory_of(episode, self.run.name).id
        return id if self.store.find([id]) else None

    def _episodes(self, phase: str) -> list[Episode]:
        for file in _files(self.run):
            if phase_of(file) == phase:
                status = file.stat()
                return _read(file, status.st_mtime_ns, status.st_size)
        raise ConfigError(f"There is no phase {phase}")

    def _figures(self, phase: str) -> dict[str, Any]:
        """What the run says of a phase without reading its episodes: {} where it says nothing."""
        assert self.run is not None  # phases are a run's
        if phase in self.run.evaluations:
            return dict(self.run.evaluations[phase]["metrics"])
        return next((line for line in reversed(self.run.metrics) if line["phase"] == phase), {})


@lru_cache(maxsize=4)
def _read(file: Path, changed: int, size: int) -> list[Episode]:
    """A phase's episodes by id, without their tokens; read anew when the file has changed."""
    found = [episode.model_copy(update={"contexts": []}) for episode in read_episodes(file)]
    return sorted(found, key=lambda episode: episode.id)


def _files(run: RunFolder | None) -> list[Path]:
    try:
        return episode_files(run.path) if run else []
    except ConfigError:  # nothing was played yet
        return []


def _filter(request: Request) -> Filter:
    told = request.query_params
    success = {"success": True, "failure": False}.get(told.get("outcome", ""))
    return Filter(
        told.get("words", ""), told.get("status", ""), told.get("world", ""), told.get("task_type", ""), success
    )


def _page_number(request: Request) -> int:
    """Counted from 0; 0 for what is no number."""
    told = request.query_params.get("page", "0")
    return int(told) if told.isascii() and told.isdigit() and len(told) < 9 else 0


def _pager(request: Request, total: int, size: int) -> dict[str, Any]:
    """Where a list stands, and the query of the pages beside it. None: there is none."""
    number = _page_number(request)
    query = {key: value for key, value in request.query_params.items() if key != "page"}
    return {
        "path": request.url.path,
        "first": min(total, size * number + 1),
        "last": min(total, size * (number + 1)),
        "total_rows": total,
        "previous": query | {"page": number - 1} if number else None,
        "next": query | {"page": number + 1} if size * (number + 1) < total else None,
    }


def _told(judgement: Judgement) -> list[tuple[str, str]]:
    """The parts of a verdict that are no tables of their own."""
    return [(key, value_text(value)) for key, value in judgement.verdict.items() if key not in ("checks", "cited")]


def _by_step(learnt: Iterable[Any]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = defaultdict(list)
    for one in learnt:
        found[one.update.step].append(one)
    return found


def _attempts(regulation: Regulation | None) -> list[Attempt]:
    if regulation is None:
        return []
    attempts = []
    for number, proposal in enumerate(regulation.proposals):
        mine = [check for check in regulation.checks if check.attempt == number]
        told = [check for check in mine if check.outcome != "idle"]
        attempts.append(Attempt(proposal, told, len(mine) - len(told), number == regulation.played))
    return attempts


def _recalled(thoughts: Sequence[KeptThought]) -> int | None:
    """The number of the thought that would be recalled."""
    known = [one for one in thoughts if not one.forgotten]
    place = best_tried([Candidate(one.founder.text, one.value, one.visits) for one in known])
    return None if place is None else known[place].number


def _outcome(episode: Episode) -> str:
    if episode.status != "ok":
        return "fault"
    return "won" if episode.won else "lost"


def _objections(episode: Episode) -> int:
    """Steps at which a predicate objected to the first proposal."""
    return sum(
        any(check.attempt == 0 and check.outcome == "violated" for check in step.regulation.checks)
        for step in episode.steps
        if step.regulation is not None
    )
