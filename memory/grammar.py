"""The grammar of a world's actions, learnt from actions alone: which words are fixed and where names stand.

Templates are found by minimum description length (Rissanen 1978; log-template mining, as Drain, has the same task): an
action is written as a template and the names in its slots, and the templates that make the whole shortest are kept. A
word such as a preposition becomes part of a template because what stands left and right of it recurs elsewhere. Names
that occur in the world's texts are cheap to write, which is what the texts are for. A number is always part of a name.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

from memory.records import Record

_SLOT = re.compile(r"\{(\d)\}")
_NAME_WORDS = 5
"""Longest name, in words, that is looked for in the texts."""
_KEYWORDS = 8
"""Fixed words tried per first word: the most frequent ones."""
_USE_COST = 0.5
"""Cost of writing a known name into a slot; a word costs 1."""
_TEMPLATE_COST = 6
"""Cost of one more template with slots, besides its words: what keeps rare compounds ("a pound of salt") names."""
_ELLIPSIS = "…"

Pattern = tuple[str | None, ...]
"""A template: its words; None stands for a slot."""


class ActionGrammar(Record):
    """``templates``: actions with slots, as ``grab {0} off {1}``, the more frequent ones first."""

    templates: tuple[str, ...] = ()

    @classmethod
    def fit(cls, actions: Iterable[str], texts: Iterable[str]) -> ActionGrammar:
        """Learn the templates.

        Args:
            actions: actions as they were sent, repetitions included; what occurs once and resembles nothing else (an
                agent's slip) gets no template.
            texts: what the world said (observations, goals); only used to recognise names.
        """
        counts = Counter(" ".join(action.split()) for action in actions)
        groups: dict[str, list[tuple[str, ...]]] = defaultdict(list)
        for action in sorted(counts):
            words = tuple(action.split())
            if words and not _SLOT.search(action):
                groups[words[0]].append(words)
        names = _names(texts, groups)
        chosen: dict[str, list[Pattern]] = {}
        fillers: dict[str, set[str]] = {}
        # Twice, so that the first groups profit from the names that the later ones brought to light.
        for _ in range(2):
            for first in sorted(groups, key=lambda first: (-len(groups[first]), first)):
                elsewhere: set[str] = set().union(*(found for other, found in fillers.items() if other != first))
                chosen[first], fillers[first] = _cover(groups[first], counts, names, elsewhere)
        weight: Counter[str] = Counter()
        for first, group in groups.items():
            for spelt in group:
                found = _assign(spelt, chosen[first])
                if found is not None:
                    weight[_text(found[0])] += counts[" ".join(spelt)]
        return cls(templates=tuple(sorted(weight, key=lambda template: (-weight[template], template))))

    def parse(self, action: str) -> tuple[str, tuple[str, ...]]:
        """(template, the names in its slots); of several templates that fit, the one with most fixed words.

        An action that none fits: (its first word and an ellipsis, ()).
        """
        words = tuple(action.split())
        found = _assign(words, self._patterns.get(words[0], ())) if words else None
        if found is None:
            return (f"{words[0]} {_ELLIPSIS}" if words else _ELLIPSIS), ()
        return _text(found[0]), found[1]

    @cached_property
    def _patterns(self) -> dict[str, list[Pattern]]:
        patterns: dict[str, list[Pattern]] = defaultdict(list)
        for template in self.templates:
            pattern = tuple(None if _SLOT.fullmatch(word) else word for word in template.split())
            patterns[pattern[0] or ""].append(pattern)
        return {word: sorted(group, key=_fixed, reverse=True) for word, group in patterns.items()}


def slots(template: str) -> int:
    """The number of slots of ``template``."""
    return len(_SLOT.findall(template))


def fill(template: str, names: Sequence[str]) -> str:
    """``template`` with ``names`` in its slots."""
    return _SLOT.sub(lambda slot: names[int(slot[1])], template)


def kind(name: str) -> str:
    """What ``name`` is an instance of: the name without trailing numbers (``box 2`` -> ``box``)."""
    words = name.split()
    while len(words) > 1 and words[-1].isdigit():
        words.pop()
    return " ".join(words)


def _text(pattern: Pattern) -> str:
    numbers = iter(range(len(pattern)))
    return " ".join(f"{{{next(numbers)}}}" if word is None else word for word in pattern)


def _fixed(pattern: Pattern) -> int:
    return sum(word is not None for word in pattern)


def _spans(words: tuple[str, ...]) -> Iterable[str]:
    for start in range(1, len(words)):
        for end in range(start + 1, min(len(words), start + _NAME_WORDS) + 1):
            yield " ".join(words[start:end])


def _names(texts: Iterable[str], groups: Mapping[str, Sequence[tuple[str, ...]]]) -> set[str]:
    """Parts of the actions in ``groups`` (by first word) that occur in ``texts`` as whole words.

    Where a text repeats a whole action, what follows its first word does not count: a world may echo.
    """
    spelt = {span.lower(): span for group in groups.values() for words in group for span in _spans(words)}
    actions = {" ".join(words).lower() for group in groups.values() for words in group}
    found: set[str] = set()
    for text in set(texts):
        words = [word.strip(".,;:!?()[]\"'") for word in text.lower().split()]
        for start in range(len(words)):
            for end in range(start + 1, min(len(words), start + _NAME_WORDS) + 1):
                span = " ".join(words[start:end])
                if span in spelt and not (start and f"{words[start - 1]} {span}" in actions):
                    found.add(spelt[span])
    return found


def _match(pattern: Pattern, words: tuple[str, ...]) -> tuple[str, ...] | None:
    """The names in the slots of ``pattern``, each as short as possible from the left; None: it does not fit."""
    names: list[str] = []
    at = 0
    for index, part in enumerate(pattern):
        if part is not None:
            if at >= len(words) or words[at] != part:
                return None
            at += 1
            continue
        end = at + 1
        if index + 1 == len(pattern):
            end = len(words)
        else:
            while end < len(words) and words[end] != pattern[index + 1]:
                end += 1
        if at >= len(words) or end > len(words):
            return None
        names.append(" ".join(words[at:end]))
        at = end
    return tuple(names) if at == len(words) else None


def _assign(words: tuple[str, ...], patterns: Iterable[Pattern]) -> tuple[Pattern, tuple[str, ...]] | None:
    """The first of ``patterns`` (most fixed words first) that fits."""
    for pattern in patterns:
        names = _match(pattern, words)
        if names is not None:
            return pattern, names
    return None


def _candidates(group: list[tuple[str, ...]]) -> list[Pattern]:
    first = group[0][0]
    frequency = Counter(word for words in group for word in set(words[1:]) if not any(map(str.isdigit, word)))
    keys = [word for word, count in sorted(frequency.items(), key=lambda item: (-item[1], item[0])) if count > 1]
    keys = keys[:_KEYWORDS]
    patterns: list[Pattern] = [(first, None)]
    for key in keys:
        patterns += [(first, key, None), (first, None, key), (first, None, key, None)]
        patterns += [(first, key, other, None) for other in keys]
        patterns += [(first, key, None, other, None) for other in keys]
        patterns += [(first, None, key, other, None) for other in keys]
        patterns += [(first, None, key, None, other, None) for other in keys]
    return patterns


def _joined(pattern: Pattern) -> bool:
    """Whether fixed words besides the first stand side by side."""
    return any(one is not None and other is not None for one, other in pairwise(pattern[1:]))


def _known(pattern: Pattern, given: Sequence[str], names: Collection[str]) -> bool:
    """Whether the names ``given`` are known, and do not go on to the left into the words of ``pattern``."""
    before = [pattern[index - 1] for index, part in enumerate(pattern) if part is None]
    return all(name in names and f"{word} {name}" not in names for word, name in zip(before, given, strict=True))


def _cover(
    group: list[tuple[str, ...]], counts: Counter[str], names: set[str], elsewhere: set[str]
) -> tuple[list[Pattern], set[str]]:
    """Greedy minimum description length over one group of distinct actions with the same first word.

    A number never begins a name: it belongs to the word before it. Returns the patterns (most fixed words first) and
    the names that they bring to light.
    """
    fits = {
        pattern: {
            words: given
            for words in group
            if (given := _match(pattern, words))
            and not any(name.split()[0].isdigit() for name in given)
            and (not _joined(pattern) or _known(pattern, given, names))
        }
        for pattern in _candidates(group)
    }
    fits = {pattern: found for pattern, found in fits.items() if len(found) > 1}

    def name_cost(name: str) -> float:
        return _USE_COST if name in elsewhere else 1.0 if name in names else 1.0 + len(name.split())

    def cost(patterns: list[Pattern]) -> tuple[float, set[str]]:
        used: set[str] = set()
        total = 0.0
        left = set(group)
        for pattern in sorted(patterns, key=_fixed, reverse=True):
            mine = [words for words in fits[pattern] if words in left]
            left.difference_update(mine)
            total += _TEMPLATE_COST + _fixed(pattern)
            for words in mine:
                used.update(fits[pattern][words])
                total += _USE_COST * len(fits[pattern][words])
        return total + sum(map(name_cost, used)) + sum(2 + len(words) for words in left), used

    chosen: list[Pattern] = []
    best, used = cost(chosen)
    while True:
        trials = [(*cost([*chosen, pattern]), pattern) for pattern in fits if pattern not in chosen]
        if not trials:
            break
        lowest, found, pattern = min(trials, key=lambda trial: (trial[0], _text(trial[2])))
        if lowest >= best:
            break
        chosen.append(pattern)
        best, used = lowest, found
    for pattern in list(chosen):  # a pattern that later ones emptied
        without = [other for other in chosen if other != pattern]
        lowest, found = cost(without)
        if lowest < best:
            chosen, best, used = without, lowest, found
    chosen.sort(key=lambda pattern: (-_fixed(pattern), _text(pattern)))
    covered = {words for pattern in chosen for words in fits[pattern]}
    left = [words for words in group if words not in covered and counts[" ".join(words)] > 1]
    named = [words for words in left if words[-1].isdigit() and " ".join(words[1:]) in names]
    if named:  # one numbered thing was ever used so, and is a thing all the same
        used |= {" ".join(words[1:]) for words in named}
        chosen.append((named[0][0], None))
    constants: list[Pattern] = [words for words in left if words not in named]
    return [*constants, *chosen], used
