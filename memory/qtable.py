"""The table of SAMem: states, the thoughts of each, and their values, learnt from episodes at barriers.

One :class:`QTable` learns; agents read :class:`Snapshot` s. At a barrier the batch of finished episodes is sorted, so
the result does not depend on how they interleaved: states and thoughts are founded in the order of episodes and steps,
then each episode is gone through from its last step back (any order of updates is Q-learning; this one carries a
reward through an episode at once).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random

import numpy as np

from memory.clusters import Clusters
from memory.embedding import Embedder, Vectors
from memory.experience import Experience, Visit
from memory.forgetting import Judge, Trial, Verdict, judge_offline
from memory.qlearning import Candidate, q_target, q_update, step_size, untried_value
from memory.samem_settings import SamemSettings
from memory.summary import situation


@dataclass(frozen=True)
class Founder:
    """The step whose summary, or thought, founded a cluster."""

    text: str
    trajectory: str
    step: int
    round: int = 0


@dataclass(frozen=True)
class Update:
    """One change of a value, and the step that caused it. ``target``: what the value was moved towards."""

    thought: int
    trajectory: str
    step: int
    reward: float
    target: float
    before: float
    after: float


@dataclass(frozen=True)
class Elsewhere:
    """What other states tell of a thought that was never tried in one (``transfer`` and ``analogy`` in the settings).

    ``values``: by situation and words, the mean over like states; ``shares``: the same of the share in the state's
    highest value, and by words alone ("" for the situation); ``trials``: by words, how many there were and how many of
    them led on; ``visits``, ``best``: of each state, steps in it and its highest value.
    """

    values: dict[tuple[str, str], float] = field(default_factory=dict)
    shares: dict[tuple[str, str], float] = field(default_factory=dict)
    trials: dict[str, tuple[int, int]] = field(default_factory=dict)
    visits: tuple[int, ...] = ()
    best: tuple[float, ...] = ()

    def value(self, settings: SamemSettings, state: int | None, summary: str, text: str) -> float:
        """Of the thought ``text`` in a state with this summary, never tried there."""
        found = settings.initial
        known = state is not None and state < len(self.visits)
        if settings.transfer:
            trials, led_on = self.trials.get(text, (0, 0))
            visits = self.visits[state] if known and state is not None else 0
            found = untried_value(settings.initial, trials, led_on, visits)
            found = max(found, settings.transfer * self.values.get((situation(summary), text), 0.0))
        if settings.analogy and known and state is not None:
            share = self.shares.get((situation(summary), text), self.shares.get(("", text), 0.0))
            found = max(found, share * self.best[state])
        return found


@dataclass
class Barrier:
    """What one batch of episodes changed.

    ``matched``: steps whose state was known before the batch; ``states``, ``thoughts``: how many there are after it;
    ``touched``: thoughts whose value, counts or standing changed.
    """

    number: int
    round: int
    episodes: int = 0
    steps: int = 0
    matched: int = 0
    states: int = 0
    thoughts: int = 0
    updates: list[Update] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    touched: set[int] = field(default_factory=set)
    snapshot: str = ""


class QTable:
    """Values of (state, thought) pairs, Q-learned.

    Args:
        embedder: turns summaries and thoughts into vectors.
        judge: asked before a thought is forgotten; None: nothing is.

    States and thoughts are numbered in the order of their founding.
    """

    def __init__(self, settings: SamemSettings, embedder: Embedder, judge: Judge | None = None) -> None:
        self.settings = settings
        self.states: list[Founder] = []
        self.thoughts: list[Founder] = []
        self.state_of: list[int] = []
        self.values: list[float] = []
        self.visits: list[int] = []
        self.led_on: list[int] = []
        """Of each thought: trials that earned something, or after which the state or the options were others."""
        self.trials: list[int] = []
        self.forgotten: set[int] = set()
        self.judged: dict[int, Verdict] = {}
        self.episodes = 0
        self.barriers = 0
        self.thoughts_of: list[list[int]] = []
        self.elsewhere = Elsewhere()
        """As of the last barrier; empty without ``transfer`` and ``analogy``."""
        self._embedder = embedder
        self._judge = judge
        self._clusters = Clusters(settings.threshold)
        self._hash = ContentHash()
        self._state_by_text: dict[str, int] = {}
        self._by_text: dict[tuple[int, str], int] = {}
        self._thought_vectors: list[Vectors | None] = []
        self._lock = threading.Lock()

    def empty(self, **changes: object) -> QTable:
        """A table that has learnt nothing, with the same settings but for ``changes``."""
        return QTable(self.settings.model_copy(update=changes), self._embedder, self._judge)

    # ---- learning

    def learn(self, batch: Iterable[Experience]) -> Barrier:
        """Update the values with finished episodes, whatever order they come in."""
        episodes = sorted(batch, key=lambda experience: (experience.order, experience.trajectory))
        with self._lock:
            return self._learn(episodes)

    def _learn(self, episodes: list[Experience]) -> Barrier:
        barrier = Barrier(self.barriers, max((episode.round for episode in episodes), default=0), len(episodes))
        known = len(self.states)
        visits = [(episode, visit) for episode in episodes for visit in episode.visits]
        states = self._assign_states(visits)
        barrier.steps = len(visits)
        barrier.matched = sum(state < known for state in states)
        thoughts = self._assign_thoughts(visits, states)
        place = 0
        for episode in episodes:
            span = slice(place, place + len(episode.visits))
            self._go_back_through(episode, states[span], thoughts[span], barrier)
            place = span.stop
        self._forget({self.state_of[thought] for thought in barrier.touched}, barrier)
        self.episodes += len(episodes)
        self.barriers += 1
        self.elsewhere = self.compare(self.values)
        barrier.states, barrier.thoughts = len(self.states), len(self.thoughts)
        barrier.snapshot = self.snapshot().id
        return barrier

    def replay(self, episodes: Sequence[Experience]) -> None:
        """Go through episodes that were learnt from once more, ``sweeps`` times, until the values agree with one
        another: experience replay (Lin 1992).

        A sweep updates each thought once for each of its trials, the k-th time with step size 1/k: its value becomes
        the mean target. Visits are not counted again, and updates are not listed.
        """
        with self._lock:
            trials = self._trials(episodes)
            for _ in range(self.settings.sweeps):
                for thought, outcomes in trials:
                    value = self.values[thought]
                    for number, (rewards, following) in enumerate(outcomes, start=1):
                        best = None if following is None else following.best(self.values)
                        target = q_target(rewards, best, self.settings.gamma)
                        value = q_update(value, target, step_size("1/N", 1.0, number))
                    self.values[thought] = value
            self.elsewhere = self.compare(self.values)

    def _trials(self, episodes: Sequence[Experience]) -> list[tuple[int, list[tuple[list[float], _Following | None]]]]:
        """Of each thought, the youngest first, what each trial earned and what could be chosen then (None: the end)."""
        found: dict[int, list[tuple[list[float], _Following | None]]] = {}
        known: dict[tuple[int, tuple[str, ...]], _Following] = {}
        number = {text: self.find_state(text)[0] for text in {v.state for e in episodes for v in e.visits}}
        for episode in episodes:
            for at, visit in enumerate(episode.visits):
                state = number[visit.state]
                after = self._after(episode, at)
                thought = None if state is None else self.find_thought(state, visit.thought)
                if after is None or thought is None or thought in self.forgotten:
                    continue
                rewards = [reward for visit in episode.visits[at:after] for reward in visit.rewards]
                following = None
                if after < len(episode.visits):
                    next_state, options = number[episode.visits[after].state], episode.visits[after].options
                    if next_state is None:
                        continue
                    if (next_state, options) not in known:
                        known[next_state, options] = self._following(next_state, options)
                    following = known[next_state, options]
                found.setdefault(thought, []).append((rewards, following))
        return sorted(found.items(), reverse=True)

    def _after(self, episode: Experience, at: int) -> int | None:
        """The step whose state's value the target of step ``at`` ends with (the number of steps: the end, none's);
        None: what came next is not known."""
        after = min(at + self.settings.n_step, len(episode.visits))
        if after == len(episode.visits) and not episode.ended:
            after -= 1  # what came after the last step is not known: rely on the value of its state
        return None if after == at else after

    def _go_back_through(self, episode: Experience, states: list[int], thoughts: list[int], barrier: Barrier) -> None:
        settings = self.settings
        visits = episode.visits
        for at in reversed(range(len(visits))):
            after = self._after(episode, at)
            thought = thoughts[at]
            if after is None or thought in self.forgotten:
                continue
            rewards = [reward for visit in visits[at:after] for reward in visit.rewards]
            best = (
                self._following(states[after], visits[after].options).best(self.values) if after < len(visits) else None
            )
            target = q_target(rewards, best, settings.gamma)
            before = self.values[thought] if self.visits[thought] else self._untried(states[at], visits[at].thought)
            self.visits[thought] += 1
            alpha = step_size(settings.step_size, settings.alpha, self.visits[thought])
            self.values[thought] = q_update(before, target, alpha)
            barrier.touched.add(thought)
            barrier.updates.append(
                Update(
                    thought,
                    episode.trajectory,
                    visits[at].step,
                    sum(visits[at].rewards),
                    target,
                    before,
                    self.values[thought],
                )
            )
            earned = sum(visits[at].rewards) > 0
            moved = at + 1 < len(visits) and (
                states[at + 1] != states[at] or set(visits[at + 1].options) != set(visits[at].options)
            )
            self.trials[thought] += 1
            self.led_on[thought] += int((earned or moved) and not visits[at].refused)

    def _following(self, state: int, options: Sequence[str]) -> _Following:
        """What can be chosen: the given options, else the state's thoughts; forgotten ones never count."""
        initial = self.settings.initial
        if not options:
            return _Following(tuple(n for n in self.thoughts_of[state] if n not in self.forgotten), None, initial)
        found = {option: self.find_thought(state, option) for option in options}
        tried = tuple(n for n in found.values() if n is not None and self.visits[n] and n not in self.forgotten)
        untried = [
            self._untried(state, option)
            for option, n in found.items()
            if n is None or (not self.visits[n] and n not in self.forgotten)
        ]
        return _Following(tried, max(untried, default=None), initial)

    def _untried(self, state: int, text: str) -> float:
        return self.elsewhere.value(self.settings, state, self.states[state].text, text)

    def compare(self, values: Sequence[float]) -> Elsewhere:
        """What states can tell one another, with these values of the thoughts."""
        if not self.settings.transfer and not self.settings.analogy:
            return Elsewhere()
        like = [situation(state.text) for state in self.states]
        trials: dict[str, tuple[int, int]] = {}
        visits, best = [0] * len(self.states), [0.0] * len(self.states)
        counting = []
        for thought, value in enumerate(values):
            state, text = self.state_of[thought], self.thoughts[thought].text
            visits[state] += self.trials[thought]
            before = trials.get(text, (0, 0))
            trials[text] = (before[0] + self.trials[thought], before[1] + self.led_on[thought])
            if thought not in self.forgotten and self.visits[thought]:
                best[state] = max(best[state], value)
                counting.append((state, text, value))
        of: dict[tuple[str, str], list[float]] = {}
        shares: dict[tuple[str, str], list[float]] = {}
        for state, text, value in counting:
            of.setdefault((like[state], text), []).append(value)
            if best[state] > 0:
                for situation_or_any in (like[state], ""):
                    shares.setdefault((situation_or_any, text), []).append(value / best[state])
        return Elsewhere(_means(of), _means(shares), trials, tuple(visits), tuple(best))

    def _forget(self, states: set[int], barrier: Barrier) -> None:
        if self.settings.forget_idle:
            for thought in sorted(barrier.touched - self.forgotten):
                verdict = judge_offline(self._trial(thought))
                if not verdict.sound:
                    self._forget_thought(verdict, barrier)
        if self._judge is None:
            return
        for state in sorted(states):
            valued = [
                thought
                for thought in self.thoughts_of[state]
                if self.values[thought] != 0 and thought not in self.forgotten
            ]
            if len(valued) <= self.settings.forget_above:
                continue
            lowest = min(valued, key=lambda thought: (self.values[thought], thought))
            if lowest in self.judged:
                continue  # found sound before
            verdict = self._judge(self._trial(lowest))
            self.judged[lowest] = verdict
            if verdict.sound:
                barrier.verdicts.append(verdict)
            else:
                self._forget_thought(verdict, barrier)

    def _trial(self, thought: int) -> Trial:
        state, text = self.states[self.state_of[thought]].text, self.thoughts[thought].text
        return Trial(thought, state, text, self.values[thought], self.trials[thought], self.led_on[thought])

    def _forget_thought(self, verdict: Verdict, barrier: Barrier) -> None:
        self.judged[verdict.thought] = verdict
        barrier.verdicts.append(verdict)
        barrier.touched.add(verdict.thought)
        self.forgotten.add(verdict.thought)
        self.values[verdict.thought] = 0.0

    # ---- states and thoughts

    def _assign_states(self, visits: list[tuple[Experience, Visit]]) -> list[int]:
        # A founder's own words need no search: no other one is nearer.
        found = [self._state_by_text.get(visit.state) for _, visit in visits]
        new = [place for place, state in enumerate(found) if state is None]
        if new:
            vectors = embed_distinct(self._embedder, [visits[place][1].state for place in new])
            numbers, founders = self._clusters.assign(vectors)
            for row in founders:
                episode, visit = visits[new[row]]
                self._add_state(Founder(visit.state, episode.trajectory, visit.step, episode.round))
            for place, number in zip(new, numbers, strict=True):
                found[place] = int(number)
        return [state for state in found if state is not None]

    def _add_state(self, founder: Founder) -> None:
        self._state_by_text[founder.text] = len(self.states)
        self.states.append(founder)
        self.thoughts_of.append([])
        self._hash.state(founder.text)

    def _assign_thoughts(self, visits: list[tuple[Experience, Visit]], states: list[int]) -> list[int]:
        if self._by_cosine:
            embed_distinct(self._embedder, [visit.thought for _, visit in visits])  # at once, if it remembers
        found = []
        for (episode, visit), state in zip(visits, states, strict=True):
            thought = self.find_thought(state, visit.thought)
            if thought is None:
                vector = self._embedder.embed([visit.thought])[0] if self._by_cosine else None
                thought = len(self.thoughts)
                founder = Founder(visit.thought, episode.trajectory, visit.step, episode.round)
                self._add_thought(founder, state, vector)
            found.append(thought)
        return found

    def _add_thought(self, founder: Founder, state: int, vector: Vectors | None) -> None:
        number = len(self.thoughts)
        self.thoughts.append(founder)
        self.state_of.append(state)
        self.values.append(self.settings.initial)
        self.visits.append(0)
        self.trials.append(0)
        self.led_on.append(0)
        self.thoughts_of[state].append(number)
        self._thought_vectors.append(vector)
        self._by_text[state, founder.text] = number
        self._hash.thought(state, founder.text)

    @property
    def _by_cosine(self) -> bool:
        """At a threshold of 1 only equal texts are one thought, and no vectors are needed."""
        return self.settings.thought_threshold < 1

    def find_thought(self, state: int, text: str, first: int | None = None) -> int | None:
        """The thought of ``state`` that ``text`` joins; None: it would found one.

        Args:
            first: only the ``first`` oldest thoughts count (a snapshot); None: all.
        """
        number = self._by_text.get((state, text))
        if number is not None and (first is None or number < first):
            return number  # a founder's own words: no other one is nearer
        own = self.thoughts_of[state]
        if first is not None:
            own = [number for number in own if number < first]
        if not self._by_cosine or not own:
            return None
        vectors = [vector for number in own if (vector := self._thought_vectors[number]) is not None]
        cosines = np.stack(vectors) @ self._embedder.embed([text])[0]
        nearest = int(cosines.argmax())
        return own[nearest] if cosines[nearest] >= self.settings.thought_threshold - 1e-5 else None

    def find_state(self, text: str, first: int | None = None) -> tuple[int | None, float]:
        """The state that a summary joins, and the cosine with its founder; None: it would found one."""
        number = self._state_by_text.get(text)
        if number is not None and (first is None or number < first):
            return number, 1.0  # its own words: no search
        numbers, cosines = self._clusters.nearest(self._embedder.embed([text]), first)
        return (None if numbers[0] < 0 else int(numbers[0])), float(cosines[0])

    # ---- taking up, and giving out

    def restore_states(self, founders: Sequence[Founder], vectors: Vectors) -> None:
        """Add states that were founded before, in their order."""
        for founder in founders:
            self._add_state(founder)
        self._clusters.found(vectors)

    def restore_thought(
        self,
        founder: Founder,
        state: int,
        vector: Vectors | None,
        *,
        value: float,
        visits: int,
        trials: int,
        led_on: int,
        forgotten: bool,
    ) -> None:
        """Add a thought that was founded before, in its order."""
        self._add_thought(founder, state, vector)
        self.values[-1], self.visits[-1], self.trials[-1], self.led_on[-1] = value, visits, trials, led_on
        if forgotten:
            self.forgotten.add(len(self.thoughts) - 1)

    def resume(self, episodes: int, barriers: int) -> None:
        """All states and thoughts are restored: go on after so many episodes and barriers."""
        self.episodes, self.barriers = episodes, barriers
        self.elsewhere = self.compare(self.values)

    def state_vector(self, state: int) -> Vectors:
        """The founder's vector, shape (d,)."""
        return self._clusters.founder(state)

    def thought_vector(self, thought: int) -> Vectors | None:
        """The founder's vector, shape (d,); None where thoughts are told apart by their words alone."""
        return self._thought_vectors[thought]

    def snapshot(self) -> Snapshot:
        """The table as it is now; what is learnt later does not change it."""
        values, visits, forgotten = tuple(self.values), tuple(self.visits), frozenset(self.forgotten)
        return Snapshot(
            self, len(self.states), self._hash.founders, values, visits, forgotten, self.elsewhere, self.episodes
        )


class ContentHash:
    """The hash of the founders of a table, which only ever grow, each kind in the order of its numbers."""

    def __init__(self) -> None:
        self._states, self._thoughts = hashlib.sha256(), hashlib.sha256()

    def state(self, text: str) -> None:
        self._states.update(f"{len(text)} {text}\n".encode("utf-8", "surrogatepass"))

    def thought(self, state: int, text: str) -> None:
        self._thoughts.update(f"{state} {len(text)} {text}\n".encode("utf-8", "surrogatepass"))

    @property
    def founders(self) -> bytes:
        return self._states.digest() + self._thoughts.digest()


def content_id(founders: bytes, values: Sequence[float], visits: Sequence[int], forgotten: Iterable[int]) -> str:
    """``q-`` and 16 hex digits of the SHA-256 over a table's founders (see :class:`ContentHash`), values, visits, and
    what was forgotten: tables of equal content have equal names."""
    digest = hashlib.sha256(founders)
    digest.update(np.asarray(values, dtype="<f8").tobytes())
    digest.update(np.asarray(visits, dtype="<i8").tobytes())
    digest.update(np.asarray(sorted(forgotten), dtype="<i8").tobytes())
    return f"q-{digest.hexdigest()[:16]}"


@dataclass(frozen=True)
class _Following:
    """What can be chosen after a step: thoughts that were tried, and the highest value of one that was not."""

    tried: tuple[int, ...]
    untried: float | None
    initial: float

    def best(self, values: Sequence[float]) -> float:
        """max Q'; the initial value where nothing can be chosen."""
        best = max((values[thought] for thought in self.tried), default=self.untried)
        if best is None:
            return self.initial
        return best if self.untried is None else max(best, self.untried)


@dataclass(frozen=True)
class Snapshot:
    """A table between two barriers: what agents read. ``values``, ``visits``: by number of the thought; ``founders``:
    their hash."""

    table: QTable
    states: int
    founders: bytes
    values: tuple[float, ...]
    visits: tuple[int, ...]
    forgotten: frozenset[int]
    elsewhere: Elsewhere
    episodes: int

    @cached_property
    def id(self) -> str:
        """The name of its content (see :func:`content_id`)."""
        return content_id(self.founders, self.values, self.visits, self.forgotten)

    def find_state(self, summary: str) -> tuple[int | None, float]:
        """The matching state, None where there is none, and the cosine with the nearest one."""
        return self.table.find_state(summary, self.states)

    def candidates(self, state: int | None, options: Sequence[str] | None, summary: str = "") -> list[Candidate]:
        """What can be chosen in ``state``, forgotten thoughts left out.

        Args:
            state: None: an unknown one, in which nothing was tried.
            options: the thoughts at hand; None: any that is known in this state.
            summary: of the state, for what other states tell of thoughts that were never tried in it.
        """
        if options is None:
            own = [] if state is None else self.table.thoughts_of[state]
            known = [thought for thought in own if thought < len(self.values) and thought not in self.forgotten]
            return [Candidate(self.table.thoughts[n].text, self.values[n], self.visits[n]) for n in known]
        found = []
        for option in dict.fromkeys(options):
            thought = None if state is None else self.table.find_thought(state, option, len(self.values))
            if thought is not None and thought in self.forgotten:
                continue
            if thought is None or not self.visits[thought]:
                value = self.elsewhere.value(self.table.settings, state, summary, option)
                found.append(Candidate(option, value, 0, known=value > self.table.settings.initial))
            else:
                found.append(Candidate(option, self.values[thought], self.visits[thought]))
        return found

    def shuffled(self, seed: int) -> Snapshot:
        """The control: the same states and thoughts, with the values of all tried thoughts permuted at random."""
        tried = [number for number, visits in enumerate(self.visits) if visits and number not in self.forgotten]
        order = list(tried)
        Random(seed).shuffle(order)
        values = list(self.values)
        for to, of in zip(tried, order, strict=True):
            values[to] = self.values[of]
        return replace(self, values=tuple(values), elsewhere=self.table.compare(values))


def _means(of: dict[tuple[str, str], list[float]]) -> dict[tuple[str, str], float]:
    return {key: sum(found) / len(found) for key, found in of.items()}


def embed_distinct(embedder: Embedder, texts: Sequence[str]) -> Vectors:
    """The vectors of ``texts``, shape (n, d), each distinct text embedded once."""
    distinct = list(dict.fromkeys(texts))
    vectors = embedder.embed(distinct)
    row = {text: number for number, text in enumerate(distinct)}
    return vectors[[row[text] for text in texts]] if texts else vectors
