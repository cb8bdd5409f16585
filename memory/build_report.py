"""What one build by a language model did, for the caller and for the eye."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from memory.answers import ANSWERS
from memory.builder_settings import VLLM_STRUCTURED_OUTPUTS
from memory.language_model import BROKEN

_TOLD = 20
"""Refusals, and faults, that the printed report lists."""


@dataclass(frozen=True)
class Refusal:
    """Something that was not taken: where (stage and subject), and why."""

    where: str
    reason: str


@dataclass
class BuildReport:
    """What one build did. Everything that the model proposed is in ``written``, ``operations`` or ``refused``."""

    round: int = 0
    written: Counter[str] = field(default_factory=Counter)
    """New records: episode, procedure, principle, predicate."""
    known: Counter[str] = field(default_factory=Counter)
    """Proposed records that the memory had already."""
    operations: Counter[str] = field(default_factory=Counter)
    """Operations carried out, as "procedure add"."""
    judged: Counter[str] = field(default_factory=Counter)
    """Principles judged harmful or harmless to violate, and those of which the model says that no check is possible."""
    refused: list[Refusal] = field(default_factory=list)
    """Claims, operations and predicates of the model that the memory did not take."""
    faults: list[Refusal] = field(default_factory=list)
    """Questions without a usable answer. What they were about waits for the next build."""
    waiting: int = 0
    """Trajectories without an episode: over the limit of this build, after a fault, or after it stopped."""
    empty: int = 0
    """Trajectories without any action, of which nothing can be told."""
    stopped: str = ""
    """Why the build stopped asking before it was done; "": it did not."""
    failed: bool = False
    """Whether it stopped because the server gave no answers (and not because a limit was reached)."""
    structured: str = ""
    """How the model's settings ask for answers to be constrained."""
    spend: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The report for the eye."""

        def counts(counter: Counter[str]) -> str:
            return ", ".join(f"{name} {count}" for name, count in sorted(counter.items())) or "none"

        money = self.spend
        lines = [
            f"new records: {counts(self.written)}",
            f"operations: {counts(self.operations)}",
            f"judgements of harm: {counts(self.judged)}",
            f"calls: {money.get('calls', 0)} paid, {money.get('cached', 0)} from the cache; "
            f"{money.get('tokens_in', 0)} + {money.get('tokens_out', 0)} tokens, cost {money.get('cost', 0.0):.4f}",
            *self._table(),
        ]
        for name in ("retried", "unusable"):
            if money.get(name):
                lines.append(f"{name}: {counts(Counter(money[name]))}")
        if self.known:
            lines.append(f"proposed again: {counts(self.known)}")
        for name, found in (("refused", self.refused), ("without a usable answer", self.faults)):
            if found:
                lines.append(f"{name}: {len(found)}")
                lines += [f"  {item.where}: {item.reason}" for item in found[:_TOLD]]
                lines += [f"  … and {len(found) - _TOLD} more"] if len(found) > _TOLD else []
        if self.waiting or self.empty:
            lines.append(f"trajectories waiting: {self.waiting}; without any action: {self.empty}")
        lines += self._constraint()
        if self.stopped:
            lines.append(f"stopped: {self.stopped}")
        return lines

    def _constraint(self) -> list[str]:
        """Whether the server constrained the answers as it was asked to."""
        form = self.spend.get("form", "")
        if form and form != self.structured:
            return [f"the server refused model.structured {self.structured!r}; it was asked with {form!r} instead"]
        unusable = self.spend.get("unusable", {})
        broken = sum(unusable.get(kind, 0) for kind in BROKEN)
        if form == "json_schema" and broken:
            return [
                f"the server took the schema and let {broken} answers break it: it does not enforce all of it; "
                f"if it is vLLM, start it with --structured-outputs-config '{VLLM_STRUCTURED_OUTPUTS}'"
            ]
        return []

    def _table(self) -> list[str]:
        """Per stage: answers, how many of them were of use and how far, and what came of them."""
        judged = self.judged["harmful"] + self.judged["harmless"]
        items = {stage: self.written[stage.removesuffix("s")] for stage in ANSWERS} | {"harm": judged}
        lines = ["stage        answers  complete  valid  grounded  items"]
        for stage, schema in ANSWERS.items():
            counts = self.spend.get("answers", {}).get(schema.__name__, {})
            if counts:
                told = [counts.get(name, 0) for name in ("answers", "complete", "valid", "grounded")]
                lines.append("{:<11}{:>9}{:>10}{:>7}{:>10}{:>7}".format(stage, *told, items[stage]))
        return lines if len(lines) > 1 else []
