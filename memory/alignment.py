"""Procedures: what successful episodes of one task type have in common.

Three steps. **Slicing** (after Weiser 1981): from the last action backwards, keep the actions that share a name with
what is kept already, so that searching drops out. **Lifting**: names become slots, equal names equal slots.
**Alignment**: a lifted sequence is supported by an episode that contains it as a subsequence under one assignment of
names to slots (as in sequential-pattern mining, Agrawal and Srikant 1995); the longest sequence with enough support is
a procedure, and the episodes that it leaves unexplained yield the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from memory.grammar import fill, kind
from memory.lifting import Event, Run, lift, mentions

Names = tuple[int | str, ...]
"""The names of a lifted action: a slot's number, or the name itself where it is the same in (almost) all episodes."""
Lifted = tuple[tuple[str, Names], ...]
"""A lifted sequence: (action form, names) per step."""

_CONSTANT_SHARE = 0.9
"""A slot that this share of the supporting episodes fill with one name becomes that name; with one kind, that kind."""
_MAX_STEPS = 30
_MAX_EPISODES = 300
"""Successful episodes of a type that are aligned."""
_MAX_TRIED = 60
"""Candidate sequences per task type: the more frequent and longer ones."""


@dataclass(frozen=True)
class Match:
    """An episode that contains a sequence. ``events``: one per step; ``names``: what fills each slot."""

    run: Run
    events: tuple[Event, ...]
    names: Mapping[int, str]


@dataclass(frozen=True)
class Procedure:
    """``steps``: ``sequence`` as actions with slots; ``names``: what stands in the slots of each step's form; ``goal``:
    the goal in the same slots, "" where goals differ in more than names."""

    task_type: str
    sequence: Lifted
    steps: tuple[str, ...]
    names: tuple[tuple[str, ...], ...]
    goal: str
    matches: tuple[Match, ...]
    of: int
    """Number of successful episodes of the type."""


def relevant(events: Sequence[Event], goal: str) -> list[Event]:
    """The backward slice from the last changing event, from what names the goal's things, and from what was rewarded.

    What brought a name into view (the latest action before its use whose answer mentions it) belongs to the slice as
    well; where that action has no names itself (a look), so does the one before it, which led to what is seen.
    Searching drops out, as it shares no name with these; so do actions without names, unless rewarded or last. A block
    of actions that is repeated at once counts once.
    """
    changing = [event for event in events if event.changed]
    if not changing:
        return []
    aims = {name for event in changing for name in event.args if mentions(goal, kind(name))}
    last = changing[-1]
    names = {*last.args, *aims}
    unseen: set[str] = set()
    kept: list[Event] = []
    led_on = False
    for event in reversed(changing):
        shown = {name for name in unseen if name not in event.args and mentions(event.result, name)}
        if event is last or event.source.reward > 0 or shown or names.intersection(event.args) or led_on:
            kept.append(event)
            unseen = (unseen | set(event.args)) - shown
            names.update(event.args)
        led_on = bool(shown) and not event.args
    return _tidy(kept[::-1])


def _tidy(events: list[Event]) -> list[Event]:
    return _without_repeats(_without_detours(_without_repeats(events)))


def _without_repeats(events: list[Event]) -> list[Event]:
    """Of equal blocks of up to four actions in a row, only the last stays."""
    for length in range(1, 5):
        at = 0
        while at + 2 * length <= len(events):
            block = [event.action for event in events[at : at + length]]
            if block == [event.action for event in events[at + length : at + 2 * length]]:
                del events[at : at + length]
            else:
                at += 1
    return events


def _without_detours(events: list[Event]) -> list[Event]:
    """Without actions that are played again before anything needed them: their names, or what they brought to view."""
    kept = []
    for number, event in enumerate(events):
        until = next((n for n, later in enumerate(events[number + 1 :]) if later.action == event.action), None)
        if until is not None and event.args:
            between = events[number + 1 : number + 1 + until]
            names = {name for later in between for name in later.args}
            if names.isdisjoint(event.args) and not any(mentions(event.result, name) for name in names):
                continue
        kept.append(event)
    return kept


def lift_events(events: Sequence[Event]) -> Lifted:
    """Names become slots, numbered as they first appear."""
    slots: dict[str, int] = {}
    return tuple((event.verb, tuple(slots.setdefault(name, len(slots)) for name in event.args)) for event in events)


def find(sequence: Lifted, events: Sequence[Event]) -> tuple[tuple[Event, ...], dict[int, str]] | None:
    """The first occurrence of ``sequence`` in ``events``, in order with gaps: (its events, slot -> name); None: none.

    Different slots take different names. The search is depth-first, latest events first, and bounded.
    """
    budget = 2000
    chosen: list[Event] = []

    def extend(step: int, end: int, names: dict[int, str]) -> dict[int, str] | None:
        nonlocal budget
        if step < 0:
            return names
        verb, wanted = sequence[step]
        for position in range(end - 1, step - 1, -1):
            budget -= 1
            if budget < 0:
                return None
            event = events[position]
            if event.verb != verb or event.refused:
                continue
            bound = _bind(wanted, event.args, names)
            if bound is None:
                continue
            chosen.append(event)
            found = extend(step - 1, position, bound)
            if found is not None:
                return found
            chosen.pop()
        return None

    names = extend(len(sequence) - 1, len(events), {})
    return None if names is None else (tuple(reversed(chosen)), names)


def _bind(wanted: Names, given: Sequence[str], names: dict[int, str]) -> dict[int, str] | None:
    bound = dict(names)
    for slot, name in zip(wanted, given, strict=True):
        if isinstance(slot, str):
            if slot != name:
                return None
        elif slot in bound:
            if bound[slot] != name:
                return None
        elif name in bound.values():
            return None
        else:
            bound[slot] = name
    return bound


def align(runs: Sequence[Run], task_type: str, *, min_share: float, min_support: int, most: int) -> list[Procedure]:
    """At most ``most`` procedures of ``task_type`` that each cover ``min_share`` of its successes, best first.

    ``min_support``: successful episodes that a procedure needs; types with fewer yield none.
    """
    successes = [run for run in runs if run.success and run.trajectory.task_type == task_type and run.events]
    successes = sorted(successes, key=lambda run: run.id)[:_MAX_EPISODES]  # ids are hashes: as good as random
    slices = [relevant(run.events, run.trajectory.goal)[-_MAX_STEPS:] for run in successes]
    tried = Counter(sequence for sequence in _patterns(slices) if sequence)
    candidates = sorted(tried, key=lambda sequence: (-tried[sequence] * len(sequence), sequence_key(sequence)))[
        :_MAX_TRIED
    ]
    found: dict[Lifted, dict[int, Match]] = {}
    for sequence in candidates:
        matches = {}
        for number, run in enumerate(successes):
            occurrence = find(sequence, run.events)
            if occurrence is not None:
                matches[number] = Match(run, *occurrence)
        if not _aimless(sequence, matches.values()):
            found[sequence] = matches
    core = _core(slices)
    if any(core <= {verb for verb, _ in sequence} for sequence in found):
        found = {sequence: found[sequence] for sequence in found if core <= {verb for verb, _ in sequence}}
    needed = max(min_support, min_share * len(successes))
    procedures: list[Procedure] = []
    covered: set[int] = set()
    while len(procedures) < most:
        # Of two sequences, the longer is the better one as long as it does not lose support with the square of length:
        # what few leave out belongs to the procedure. One that merely leaves something out is no variant.
        scored = [
            (len(matches.keys() - covered) * len(sequence) ** 2, sequence_key(sequence), sequence)
            for sequence, matches in found.items()
            if len(matches.keys() - covered) >= needed and not (covered and covered <= matches.keys())
        ]
        if not scored:
            break
        best = max(scored)[2]
        matches = found[best]
        covered |= matches.keys()
        procedures.append(_procedure(best, list(matches.values()), task_type, len(successes)))
    return procedures


def _core(slices: Sequence[Sequence[Event]]) -> set[str]:
    """The forms that (almost) every successful episode needed."""
    counts = Counter(verb for events in slices for verb in {event.verb for event in events})
    return {verb for verb, count in counts.items() if count >= _CONSTANT_SHARE * len(slices)}


def _aimless(sequence: Lifted, matches: Collection[Match]) -> bool:
    """Whether some step is one of a search: its names vary, no other step has them, the goal does not name them, and it
    shows nothing used later (what a look right after it shows counts as shown by it).
    """
    uses = Counter(slot for _, wanted in sequence for slot in set(wanted))
    for number, (_, wanted) in enumerate(sequence[:-1]):
        if wanted and all(uses[slot] == 1 for slot in wanted):
            fillers = [Counter(match.names[slot] for match in matches) for slot in wanted if isinstance(slot, int)]
            aimed = sum(_leads_on(match.events[number:]) or _named(match, number) for match in matches)
            varied = all(counts and max(counts.values()) < _CONSTANT_SHARE * len(matches) for counts in fillers)
            if varied and aimed < _CONSTANT_SHARE * len(matches):
                return True
    return False


def _named(match: Match, number: int) -> bool:
    """Whether the goal names what step ``number`` is about."""
    return all(mentions(match.run.trajectory.goal, kind(name)) for name in match.events[number].args)


def _leads_on(events: Sequence[Event]) -> bool:
    """Whether the first of ``events``, or a look (an action without names) right after it, shows a name used later."""
    looks = events[:2] if len(events) > 1 and not events[1].args else events[:1]
    return any(_shows(event, events[number + 1 :]) for number, event in enumerate(looks))


def _shows(event: Event, later: Sequence[Event]) -> bool:
    return any(mentions(event.result, name) for after in later for name in after.args if name not in event.args)


def sequence_key(sequence: Lifted) -> str:
    """A total order, for results that do not depend on hashing."""
    return repr(sequence)


def _patterns(slices: Sequence[Sequence[Event]]) -> list[Lifted]:
    """The lifted slices, and what pairs of them have in common (longest common subsequence of forms, then lifted)."""
    slices = [events for events in slices if events]
    lifted = [lift_events(events) for events in slices]
    common = [*lifted]
    for events in slices:
        uses = Counter(name for event in events for name in set(event.args))
        aimed = [event for event in events if not event.args or any(uses[name] > 1 for name in event.args)]
        common.append(lift_events(aimed))
    distinct = dict(zip(lifted, slices, strict=True))
    frequent = [sequence for sequence, _ in Counter(lifted).most_common(12)]
    for number, first in enumerate(frequent):
        for second in frequent[:number]:
            shared = _tidy(_common(distinct[first], distinct[second]))
            if shared:
                common.append(lift_events(shared))
    return common


def _common(first: Sequence[Event], second: Sequence[Event]) -> list[Event]:
    """Those events of ``first`` that make a longest common subsequence with ``second`` of equal forms."""
    rows = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i in range(len(first) - 1, -1, -1):
        for j in range(len(second) - 1, -1, -1):
            same = first[i].verb == second[j].verb
            rows[i][j] = 1 + rows[i + 1][j + 1] if same else max(rows[i + 1][j], rows[i][j + 1])
    shared = []
    i = j = 0
    while i < len(first) and j < len(second):
        if first[i].verb == second[j].verb:
            shared.append(first[i])
            i, j = i + 1, j + 1
        elif rows[i + 1][j] >= rows[i][j + 1]:
            i += 1
        else:
            j += 1
    return shared


def _procedure(sequence: Lifted, matches: list[Match], task_type: str, of: int) -> Procedure:
    """Slots that hardly vary become what fills them; the others are numbered anew; the goal gets the same slots."""
    names: dict[int, str] = {}
    fresh = 0
    slots = sorted({slot for _, wanted in sequence for slot in wanted if isinstance(slot, int)})
    number: dict[int, int] = {}
    for slot in slots:
        fillers = Counter(match.names[slot] for match in matches)
        kinds = Counter(kind(match.names[slot]) for match in matches)
        (name, uses), (sort, sorts) = _first(fillers), _first(kinds)
        if uses >= _CONSTANT_SHARE * len(matches):
            names[slot] = name
            continue
        number[slot] = fresh
        fresh += 1
        numbered = f"{{{number[slot]}}}"
        constant = sorts >= _CONSTANT_SHARE * len(matches) and any(kind(filler) != filler for filler in fillers)
        names[slot] = f"{sort} {numbered}" if constant else numbered
    filled = [tuple(names[slot] if isinstance(slot, int) else slot for slot in wanted) for _, wanted in sequence]
    goals: Counter[str] = Counter()
    for match in matches:
        # A goal says kinds ("some coin"), an action instances ("coin 1").
        fillers_of = {number[slot]: kind(match.names[slot]) for slot in number if names[slot] == f"{{{number[slot]}}}"}
        named = [fillers_of.get(index, "") for index in range(fresh)]
        goal = match.run.trajectory.goal
        lifted = lift(goal, [name if name and mentions(goal, name) else "" for name in named])
        goals[" ".join(lifted.split()).rstrip(".")] += 1
    goal, uses = _first(goals)
    return Procedure(
        task_type=task_type,
        sequence=sequence,
        steps=tuple(fill(verb, given) for (verb, _), given in zip(sequence, filled, strict=True)),
        names=tuple(filled),
        goal=goal if uses > 1 or len(matches) == 1 else "",
        matches=tuple(matches),
        of=of,
    )


def _first(counts: Counter[str]) -> tuple[str, int]:
    return min(counts.items(), key=lambda item: (-item[1], item[0]))
