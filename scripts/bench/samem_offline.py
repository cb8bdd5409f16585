"""Do learnt values of thoughts tell which held-out episodes succeed? From stored rollouts, five folds over games.

    python scripts/bench/samem_offline.py ROLLOUTS.jsonl.xz --world alfworld --grammar alfworld-0.3

A table is learnt from four fifths of the games (written thoughts, deterministic summaries, the outcome as reward at the
end), and scores the episodes of the others: the mean value of those of their thoughts that it knows in the matching
state; 0 where it knows none. The last step of an episode is left out, for it is what solved it.

    AUC        chance that a solved episode scores above an unsolved one, with a 95 % interval (bootstrap over episodes)
    early      the same from the first five steps only
    permuted   the control: the same table with its values permuted over all thoughts
    outcomes   another control: learnt with the outcomes permuted among the training episodes. It is above 1/2, because
               thoughts near the end of an episode are discounted less, whatever the outcome
    length     what the number of steps alone would tell

Differences are paired over episodes. Exit code 1: the interval of the AUC less a control's does not lie above zero.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
FOLDS = 5
EARLY = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--world", default="alfworld")
    parser.add_argument("--grammar", default="alfworld-0.3")
    parser.add_argument("--embedder", choices=("hashing", "minilm"), default="hashing")
    parser.add_argument("--threshold", type=float, default=0.85, help="of states and of thoughts")
    parser.add_argument("--gamma", type=float, default=0.95)
    args = parser.parse_args()

    from envs.cache import cache_folder
    from memory.embedding import make_embedder
    from memory.formats import Labels
    from memory.samem_settings import SamemSettings
    from memory.settings import EmbedderSettings
    from train.ingest import outside_trajectories

    kind = EmbedderSettings(kind=args.embedder)
    settings = SamemSettings(
        threshold=args.threshold,
        thought_threshold=args.threshold,
        embedder=kind,
        step_size="1/N",
        gamma=args.gamma,
        judge="none",
    )
    embedder = make_embedder(kind, cache_folder() / "vectors.db")
    found = outside_trajectories(args.file, Labels(args.world, args.grammar)).trajectories
    found = [of for of in found if of.success is not None and len(of.steps) > 1]
    solved = np.array([bool(of.success) for of in found])
    learnt, permuted = scores(found, settings, embedder, shuffle_outcomes=False)
    outcomes, _ = scores(found, settings, embedder, shuffle_outcomes=True)
    lengths = np.array([-float(len(of.steps)) for of in found])
    print(f"{len(found)} episodes, {solved.sum()} solved; {args.embedder}, threshold {args.threshold}")
    for name, score in (
        ("values", learnt[0]),
        ("values, early", learnt[1]),
        ("permuted", permuted[0]),
        ("permuted, early", permuted[1]),
        ("outcomes", outcomes[0]),
        ("outcomes, early", outcomes[1]),
        ("length", lengths),
    ):
        low, high = interval(lambda rows, score=score: auc(score[rows], solved[rows]), solved)
        print(f"{name:16} AUC {auc(score, solved):.3f} ({low:.3f} to {high:.3f})")
    holds = True
    for name, control in (("permuted", permuted[0]), ("outcomes", outcomes[0])):
        low, high = interval(
            lambda rows, control=control: auc(learnt[0][rows], solved[rows]) - auc(control[rows], solved[rows]), solved
        )
        mean = auc(learnt[0], solved) - auc(control, solved)
        print(f"values - {name}: {mean:+.3f} ({low:+.3f} to {high:+.3f})")
        holds &= low > 0
    return 0 if holds else 1


Scores = tuple[np.ndarray, np.ndarray]
"""Of each episode the mean value of its thoughts, and of the early ones. Shape (episodes,) each."""


def scores(found: Sequence[Any], settings: Any, embedder: Any, *, shuffle_outcomes: bool) -> tuple[Scores, Scores]:
    """By tables that never saw an episode's game, and by the same with their values permuted."""
    from memory.qtable import QTable
    from memory.summary import Words
    from train.samem import experiences

    games = sorted({of.task for of in found})
    random.Random(0).shuffle(games)
    fold = {game: number % FOLDS for number, game in enumerate(games)}
    learnt, permuted = np.zeros((2, len(found))), np.zeros((2, len(found)))
    for number in range(FOLDS):
        training = [of for of in found if fold[of.task] != number]
        if shuffle_outcomes:
            outcomes = [of.success for of in training]
            random.Random(number).shuffle(outcomes)
            training = [
                of.model_copy(update={"success": outcome, "score": float(bool(outcome))})
                for of, outcome in zip(training, outcomes, strict=True)
            ]
        words = Words.learn(training)
        table = QTable(settings, embedder)
        table.learn(experiences(training, words, settings))
        control = table.snapshot().shuffled(number).values
        for place, of in enumerate(found):
            if fold[of.task] == number:
                [episode] = experiences([of], words, settings)
                thoughts = []
                for visit in episode.visits[:-1]:
                    state, _ = table.find_state(visit.state)
                    thoughts.append(None if state is None else table.find_thought(state, visit.thought))
                for into, values in ((learnt, table.values), (permuted, control)):
                    known = [None if thought is None else values[thought] for thought in thoughts]
                    into[:, place] = mean_known(known), mean_known(known[:EARLY])
    return (learnt[0], learnt[1]), (permuted[0], permuted[1])


def mean_known(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


def auc(score: np.ndarray, solved: np.ndarray) -> float:
    """Area under the ROC curve: P(score of a solved one > score of another), ties counted half (Mann and Whitney)."""
    above = score[solved][:, None] - score[~solved][None, :]
    return float((above > 0).mean() + 0.5 * (above == 0).mean())


def interval(
    statistic: Callable[[np.ndarray], float], solved: np.ndarray, samples: int = 500, seed: int = 0
) -> tuple[float, float]:
    """95 % interval of a statistic of the episodes with these rows (percentile bootstrap over episodes)."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(samples):
        rows = generator.integers(len(solved), size=len(solved))
        if 0 < solved[rows].sum() < len(rows):
            found.append(statistic(rows))
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
