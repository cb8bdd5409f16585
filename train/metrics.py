"""What an evaluation reports: pure functions over finished episodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

from memory.statistics import paired_bootstrap as paired_bootstrap
from memory.statistics import wilson_interval as wilson_interval
from train.trajectory import Episode

FailureClass = Literal["knowledge", "execution", "budget", "invalid", "fault"]
FAILURES: tuple[FailureClass, ...] = ("knowledge", "execution", "budget", "invalid", "fault")


def spl(won: bool, steps: int, expert_steps: int) -> float:
    """Success weighted by path length (Anderson et al. 2018): won * l / max(p, l)."""
    return float(won) * expert_steps / max(steps, expert_steps, 1)


def repeated_actions(episode: Episode) -> int:
    """Actions that repeat an earlier one of the episode after which the world answered just the same."""
    seen: set[tuple[str | None, str]] = set()
    repeated = 0
    for step in episode.steps:
        key = (step.action, step.result)
        repeated += key in seen
        seen.add(key)
    return repeated


def failure_class(episode: Episode) -> FailureClass | None:
    """Why an episode failed; None when it was won. The first rule that fits:

    - ``fault``: world or model failed (status other than ok);
    - ``invalid``: at least half of the turns were refused or malformed: it does not speak the world's language;
    - ``execution``: at least a third of the turns repeated an action that had given the same answer before: it can act,
      and goes in circles;
    - ``budget``: the step cap ended it while it was on its way (see :func:`was_on_its_way`);
    - ``knowledge``: the rest. It acted in well-formed, ever new ways with room to spare, and did not find what to do,
      or ended the task by doing the wrong thing. This is what a memory can mend.
    """
    if episode.won and episode.status == "ok":
        return None
    turns = max(1, len(episode.steps))
    if episode.status != "ok":
        return "fault"
    if episode.invalid_actions * 2 >= turns:
        return "invalid"
    if repeated_actions(episode) * 3 >= turns:
        return "execution"
    return "budget" if episode.truncated and was_on_its_way(episode) else "knowledge"


def was_on_its_way(episode: Episode) -> bool:
    """Whether more steps might have won: fewer were played than twice a known solution takes, or the score still rose
    in the last quarter of them."""
    steps = episode.steps
    if episode.expert_steps and len(steps) < 2 * episode.expert_steps:
        return True
    last = max(1, len(steps) // 4)
    before, after = ([step.score for step in part] for part in (steps[:-last], steps[-last:]))
    return bool(before) and max(after) > max(before)


def summarise(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Metrics over ``episodes`` (every item, faults included in each denominator) and the same per task type.

    The interval is Wilson's over items: several seeds of an item are averaged first, since they are not independent.
    """
    groups: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        groups[episode.task_type].append(episode)
    return {**_summary(episodes), "by_type": {name: _summary(groups[name]) for name in sorted(groups)}}


def success_by_try(tries: Sequence[Sequence[Episode]], most: int) -> list[float]:
    """Share of items won within 1, 2, … ``most`` tries, their seeds averaged first.

    Args:
        tries: of each start the tries of it, in order; none after a won one.
    """
    rates = []
    for count in range(1, most + 1):
        items: dict[str, list[bool]] = defaultdict(list)
        for start in tries:
            items[start[0].task].append(any(one.won and one.status == "ok" for one in start[:count]))
        rates.append(sum(sum(wins) / len(wins) for wins in items.values()) / max(1, len(items)))
    return rates


def _summary(episodes: Sequence[Episode]) -> dict[str, Any]:
    n = len(episodes)
    items: dict[str, list[bool]] = defaultdict(list)
    for episode in episodes:
        items[episode.task].append(episode.won and episode.status == "ok")
    per_item = [sum(wins) / len(wins) for wins in items.values()]
    turns = max(1, sum(len(episode.steps) for episode in episodes))
    known = [episode for episode in episodes if episode.expert_steps]
    failures: dict[str, int] = defaultdict(int)
    for episode in episodes:
        kind = failure_class(episode)
        if kind:
            failures[kind] += 1
    asked = [step.recall for episode in episodes for step in episode.steps if step.recall is not None]
    recalled = [recall for recall in asked if recall.thought]
    count = max(1, n)
    return {
        "episodes": n,
        "items": len(items),
        "success": sum(per_item) / max(1, len(per_item)),
        "success_interval": list(wilson_interval(sum(per_item), len(per_item))),
        "score": sum(episode.score for episode in episodes) / count,
        "steps": sum(len(episode.steps) for episode in episodes) / count,
        "spl": sum(spl(e.won, len(e.steps), e.expert_steps or 0) for e in known) / len(known) if known else None,
        "invalid_rate": sum(episode.invalid_actions for episode in episodes) / turns,
        "repeated_rate": sum(repeated_actions(episode) for episode in episodes) / turns,
        "state_found_rate": sum(recall.state is not None for recall in asked) / len(asked) if asked else None,
        "recalled_rate": len(recalled) / len(asked) if asked else None,
        "followed_rate": sum(bool(recall.followed) for recall in recalled) / len(recalled) if recalled else None,
        "tokens_in": sum(episode.tokens_in for episode in episodes),
        "tokens_out": sum(episode.tokens_out for episode in episodes),
        "faults": sum(episode.status != "ok" for episode in episodes),
        "failures": {kind: failures[kind] for kind in FAILURES if kind in failures},
    }
