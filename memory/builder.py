"""The builder that a strong language model does: trajectories -> episodes -> procedures -> principles -> predicates.

Each stage looks at what is new since it last ran (a journal in the builder's folder says what it has been shown) beside
what exists, and answers with operations: add, merge, refine, contradict, retire. What the model claims must stand in
the steps it cites: claims are checked before they are written, and by the store again. Nothing the model says is
executed; its texts are kept as text, and predicates pass the static check of :mod:`memory.predicates`.

What an experiment has established is not the model's to undo: audited and validated principles can be contradicted and
supplemented, but neither replaced nor retired by it.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel

from memory.answers import (
    Claim,
    EpisodeAnswer,
    HarmAnswer,
    PredicateAnswer,
    PrincipleAnswer,
    PrincipleOperation,
    ProcedureAnswer,
    ProcedureOperation,
)
from memory.build_prompts import (
    Attempt,
    Instructions,
    beside,
    check_citation,
    check_claim,
    contrast,
    episode_material,
    harm_material,
    instructions,
    predicate_material,
    principles_material,
    procedures_material,
)
from memory.build_report import BuildReport, Refusal
from memory.builder_settings import BuilderSettings
from memory.language_model import (
    BudgetSpent,
    LanguageModel,
    LanguageModelFault,
    Message,
    RequestRefused,
    UnusableAnswer,
)
from memory.lifting import GRAMMAR_TRAJECTORIES, fit_grammar
from memory.predicates import compile_predicate
from memory.records import (
    EpisodeItem,
    Evidence,
    KeyStep,
    Link,
    MemoryRecordError,
    Predicate,
    PrincipleItem,
    ProcedureItem,
    Trajectory,
)
from memory.retrieve import utility
from memory.store import Store, Stored

Group = tuple[str, str, str]
"""(world, grammar, task type): what is learnt together."""

A = TypeVar("A", bound=BaseModel)

_FAULTS_IN_A_ROW = 3
"""After so many requests that failed for good, one after the other, a build stops asking."""
_FORM_USES = 3
"""Actions of a form that the world took (or did not say that it refused) before the model is shown the form."""
_HARM_ATTEMPTS = 6
"""Attempts that a judgement of harm is shown."""
_PROTECTED = ("audited", "validated")


@dataclass(frozen=True)
class _Question(Generic[A]):
    """One call of the model. ``check``: what is wrong with a valid answer, in sentences for the model."""

    where: str
    messages: list[Message]
    schema: type[A]
    check: Callable[[A], list[str]] = lambda _: []
    reasks: int | None = None


class LanguageModelBuilder:
    """Builds ``store`` with ``model``.

    Args:
        folder: of the journal ``build.jsonl``: one line for each answer that was used, with what it was shown and what
            became of it, and one for each build with what it paid. A build goes by it on what is new.
        tell: takes a line on the progress now and then.
    """

    def __init__(
        self,
        store: Store,
        model: LanguageModel,
        settings: BuilderSettings,
        folder: Path,
        *,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._model = model
        self._settings = settings
        self._journal = folder / "build.jsonl"
        self._tell = tell
        self._wrote: list[str] = []
        self._shown = self._read_journal()
        self._failures = 0
        self._report = BuildReport()
        self._forms: dict[str, tuple[str, ...]] = {}
        self._telling: dict[str, EpisodeItem] = {}

    def build(self, round: int = 0) -> BuildReport:
        """Run the stages on what is new. Faults of model and server are reported, not raised; what they held up waits.

        Raises:
            MemoryRecordError: the journal is damaged.
        """
        self._report = BuildReport(round=round, structured=self._model.settings.structured)
        self._failures = 0
        self._forms = {}
        self._episodes()
        self._procedures()
        self._principles()
        if self._settings.predicates:
            self._telling = {own.item.trajectory: own.item for own in self._own_episodes()}
            self._judge_harm()
            self._propose_predicates()
        self._report.spend = self._model.spend.as_dict()
        if self._report.spend["calls"]:
            self._append({"stage": "build", "round": round, "shown": [], "spend": self._report.spend})
        return self._report

    # ---- episodes

    def _episodes(self) -> None:
        told = {stored.item.trajectory for stored in self._own_episodes()}
        prompt = instructions("episode")
        done = 0
        pending = self._pending(told)
        while batch := list(islice(pending, 4 * self._model.settings.concurrency)):
            if self._report.stopped:
                self._report.waiting += len(batch)
                continue
            questions = [self._episode_question(prompt, trajectory) for trajectory in batch]
            for trajectory, answer in zip(batch, self._ask(questions), strict=True):
                if answer is None:
                    self._wait("episode", [trajectory.id])
                    self._report.waiting += 1
                else:
                    self._write_episode(trajectory, answer, prompt)
            done += len(batch)
            self._tell(f"episodes: {done} trajectories read")

    def _pending(self, told: set[str]) -> Iterator[Trajectory]:
        left = self._settings.max_trajectories
        for trajectory in self._store.trajectories():
            if trajectory.id in told:
                continue
            if all(step.action is None for step in trajectory.steps):
                self._report.empty += 1
            elif trajectory.id in self._shown["unanswered episode"]:
                yield trajectory  # beside the limit, lest hopeless ones take all of it in every build
            elif left == 0:
                self._report.waiting += 1
            else:
                left = None if left is None else left - 1
                yield trajectory

    def _episode_question(self, prompt: Instructions, trajectory: Trajectory) -> _Question[EpisodeAnswer]:
        material = episode_material(trajectory, self._settings.step_characters, self._settings.trajectory_characters)

        def check(answer: EpisodeAnswer) -> list[str]:
            claims = [*answer.key_steps, *answer.obstacles]
            wrong = [check_claim(claim.step, claim.quote, trajectory) for claim in claims]
            return [problem for problem in wrong if problem] or ([] if claims else ["There is no key step; give one."])

        return _Question(f"episode of {trajectory.id}", prompt.messages(material), EpisodeAnswer, check)

    def _write_episode(self, trajectory: Trajectory, answer: EpisodeAnswer, prompt: Instructions) -> None:
        where = f"episode of {trajectory.id}"
        good: dict[str, list[Claim]] = {"key_steps": [], "obstacles": []}
        evidence: list[Evidence] = []
        wrong: list[Evidence] = []
        for name, kept in good.items():
            for claim in getattr(answer, name):
                problem = check_claim(claim.step, claim.quote, trajectory)
                cited = _evidence(trajectory, claim.step, claim.quote)
                if problem is None and cited:
                    kept.append(claim)
                    evidence.append(cited)
                elif cited:
                    wrong.append(cited)
                else:
                    self._refuse(where, f"{name}: {problem}")
        item = EpisodeItem(
            world=trajectory.world,
            grammar=trajectory.grammar,
            task_type=trajectory.task_type,
            builder=f"{self._model.name} {prompt.label}",
            round=self._report.round,
            trajectory=trajectory.id,
            goal=trajectory.goal or answer.goal,
            outcome={True: "success", False: "failure", None: "unknown"}[trajectory.success],  # type: ignore[arg-type]
            key_steps=tuple(KeyStep(step=claim.step, what=claim.what) for claim in good["key_steps"]),
            obstacles=tuple(f"step {claim.step}: {claim.what}" for claim in good["obstacles"]),
        )
        # The store is shown what is wrong as well, each by itself: it rejects and counts it.
        cites = [tuple(evidence), *((cited,) for cited in wrong)]
        links = [Link(lower=trajectory.id, upper=item.id, evidence=cited) for cited in cites if cited]
        if not self._write(where, item, links):
            self._report.faults.append(Refusal(where, "no claim that stands in the trajectory"))
            self._report.waiting += 1

    # ---- procedures and principles

    def _procedures(self) -> None:
        prompt = instructions("procedures")

        def question(group: Group, shown: dict[str, Attempt]) -> tuple[_Question[ProcedureAnswer], dict[str, Stored]]:
            known = self._known(2, group, "P")
            material = procedures_material(group[2], self._action_forms(group[1]), self._rows(known), shown)

            def check(answer: ProcedureAnswer) -> list[str]:
                return [
                    f"Operation {number}: {problem}"
                    for number, operation in enumerate(answer.operations, 1)
                    for problem in self._problems(operation, known, {}, shown)
                ]

            return _Question(_where("procedures", group), prompt.messages(material), ProcedureAnswer, check), known

        def apply(group: Group, answer: ProcedureAnswer, known: dict[str, Stored], shown: dict[str, Attempt]) -> None:
            for number, operation in enumerate(answer.operations, 1):
                self._operate(f"{_where('procedures', group)}, operation {number}", group, operation, known, {}, shown)

        self._stage("procedures", prompt, question, apply)

    def _principles(self) -> None:
        prompt = instructions("principles")

        def question(
            group: Group, shown: dict[str, Attempt]
        ) -> tuple[_Question[PrincipleAnswer], tuple[dict[str, Stored], dict[str, Stored]]] | None:
            procedures = self._known(2, group, "P")
            if not procedures:
                return None  # there is nothing yet that a principle could rest on
            known = self._known(3, group, "R")
            material = principles_material(
                group[2], self._action_forms(group[1]), self._rows(procedures), self._rows(known), shown
            )

            def check(answer: PrincipleAnswer) -> list[str]:
                return [
                    f"Operation {number}: {problem}"
                    for number, operation in enumerate(answer.operations, 1)
                    for problem in self._problems(operation, known, procedures, shown)
                ]

            asked = _Question(_where("principles", group), prompt.messages(material), PrincipleAnswer, check)
            return asked, (known, procedures)

        def apply(
            group: Group,
            answer: PrincipleAnswer,
            context: tuple[dict[str, Stored], dict[str, Stored]],
            shown: dict[str, Attempt],
        ) -> None:
            for number, operation in enumerate(answer.operations, 1):
                where = f"{_where('principles', group)}, operation {number}"
                self._operate(where, group, operation, context[0], context[1], shown)

        self._stage("principles", prompt, question, apply)

    def _stage(
        self,
        stage: str,
        prompt: Instructions,
        question: Callable[[Group, dict[str, Attempt]], tuple[_Question[A], Any] | None],
        apply: Callable[[Group, A, Any, dict[str, Attempt]], None],
    ) -> None:
        """Show each group's new episodes, some at a time; the groups' questions go out together."""
        pending: dict[Group, list[EpisodeItem]] = defaultdict(list)
        older: dict[Group, list[EpisodeItem]] = defaultdict(list)
        for stored in self._own_episodes():
            group = (stored.item.world, stored.item.grammar, stored.item.task_type)
            if stored.status != "retired":
                (older if stored.id in self._shown[stage] else pending)[group].append(stored.item)
        for of_group in pending.values():  # what found no answer before comes last, lest it block the others
            of_group.sort(key=lambda item: item.id in self._shown[f"unanswered {stage}"])
        size = self._settings.episodes_per_call
        while pending and not self._report.stopped:
            asked: list[tuple[Group, dict[str, Attempt], _Question[A], Any]] = []
            for group in sorted(pending):
                # More than fit, so that failures can be shown beside successes.
                chosen = contrast(map(self._attempt, pending[group][: 4 * size]), size)
                chosen += beside(chosen, map(self._attempt, older[group][-4 * size :]), max(1, size // 4))
                shown = {f"E{number}": attempt for number, attempt in enumerate(chosen, 1)}
                made = question(group, shown)
                if made is None:
                    del pending[group]
                    continue
                asked.append((group, shown, *made))
            answers = self._ask([made for _, _, made, _ in asked])
            for (group, shown, _, context), answer in zip(asked, answers, strict=True):
                if answer is None:
                    self._wait(stage, [attempt.episode.id for attempt in shown.values()])
                    pending.pop(group)
                    continue
                before, self._wrote = len(self._report.refused), []
                apply(group, answer, context, shown)
                ids = [attempt.episode.id for attempt in shown.values()]
                self._note(stage, prompt, group, ids, answer, self._report.refused[before:])
                older[group] += [item for item in pending[group] if item.id in ids]
                pending[group] = [item for item in pending[group] if item.id not in ids]
                if not pending[group]:
                    del pending[group]
            if asked:
                self._tell(f"{stage}: {sum(map(len, pending.values()))} episodes to show")

    def _problems(
        self,
        operation: ProcedureOperation | PrincipleOperation,
        known: dict[str, Stored],
        procedures: dict[str, Stored],
        shown: dict[str, Attempt],
    ) -> list[str]:
        """What keeps an operation from being carried out as it stands, in sentences for the model."""
        name = operation.operation
        problems = [f"{alias!r} is no target; there are {', '.join(known) or 'none'}." for alias in operation.targets
                    if alias not in known]  # fmt: skip
        if name == "add" and operation.targets:
            problems.append("add takes no targets; use refine or merge.")
        if name in ("refine", "contradict") and len(operation.targets) != 1:
            problems.append(f"{name} takes one target.")
        if name in ("merge", "retire") and not operation.targets:
            problems.append(f"{name} needs targets.")
        if name in ("add", "refine") and not operation.is_text:
            problems.append(f"{name} needs a text.")
        cited = operation.evidence
        if name in ("add", "contradict") and not cited:
            problems.append(f"{name} needs evidence.")
        if name == "merge" and len(operation.targets) == 1 and not (operation.is_text or cited):
            problems.append("merge of one target needs a text or evidence.")
        if isinstance(operation, PrincipleOperation):
            problems += [f"{alias!r} is no procedure; there are {', '.join(procedures)}."
                         for alias in operation.procedures if alias not in procedures]  # fmt: skip
            if name in ("add", "contradict") and not operation.procedures:
                problems.append(f"{name} needs the procedure that it belongs to.")
        return problems + [problem for citation in cited if (problem := check_citation(citation, shown))]

    def _operate(
        self,
        where: str,
        group: Group,
        operation: ProcedureOperation | PrincipleOperation,
        known: dict[str, Stored],
        procedures: dict[str, Stored],
        shown: dict[str, Attempt],
    ) -> None:
        """Carry out what of ``operation`` stands; refuse the rest."""
        is_principle = isinstance(operation, PrincipleOperation)
        wrong = [citation for citation in operation.evidence if check_citation(citation, shown)]
        bare = operation.model_copy(update={"evidence": [cited for cited in operation.evidence if cited not in wrong]})
        problems = self._problems(bare, known, procedures, shown)
        if problems:
            for citation in wrong:
                self._refuse(where, f"evidence: {check_citation(citation, shown)}")
            self._refuse(where, f"{operation.operation}: {' '.join(problems)}")
            return
        targets = [self._store.item(known[alias].id) for alias in dict.fromkeys(bare.targets)]
        gone = [target.id for target in targets if target.status == "retired"]
        if gone:
            self._refuse(where, f"{operation.operation}: {', '.join(gone)} was retired by an operation before")
            return
        lowers = [procedures[alias].id for alias in dict.fromkeys(bare.procedures)] if is_principle else []  # type: ignore[union-attr]

        def links(upper: str, relation: Literal["supports", "contradicts"] = "supports") -> list[Link]:
            """Of the evidence, and of what is wrong with it each by itself: the store rejects and counts that."""
            by_lower: dict[str, list[Evidence]] = defaultdict(list)
            bad: list[tuple[str, Evidence]] = []
            for citation in operation.evidence:
                attempt = shown.get(citation.episode)
                cited = _evidence(attempt.trajectory, citation.step, citation.quote) if attempt else None
                if attempt is None or cited is None:
                    self._refuse(where, f"evidence: {check_citation(citation, shown)}")
                    continue
                for lower in lowers if is_principle else [attempt.episode.id]:
                    if citation in wrong:
                        bad.append((lower, cited))
                    else:
                        by_lower[lower].append(cited)
            whole = [(lower, tuple(items)) for lower, items in by_lower.items()]
            return [
                Link(lower=lower, upper=upper, relation=relation, evidence=items)
                for lower, items in [*whole, *((lower, (item,)) for lower, item in bad)]
            ]

        done = False
        if bare.operation == "contradict":
            done = self._link(where, links(targets[0].id, "contradicts"))
        elif bare.operation == "retire":
            retired = [self._retire(where, target, bare.reason) for target in targets]
            done = any(retired)
        elif bare.operation == "merge" and not bare.is_text:
            keep, *others = sorted(targets, key=lambda target: target.status == "rejected")  # what is in use stays
            done = self._link(where, [*_carried(self._store, others, keep.id), *links(keep.id)])
            self._replace(where, keep.id, others, f"merged into {keep.id}: {bare.reason}")
        else:
            item = self._item(group, bare)
            if self._write(where, item, [*_carried(self._store, targets, item.id), *links(item.id)]):
                self._replace(where, item.id, targets, f"{bare.operation}d into {item.id}: {bare.reason}")
                done = True
        if done:
            self._report.operations[f"{'principle' if is_principle else 'procedure'} {bare.operation}"] += 1

    def _item(self, group: Group, operation: ProcedureOperation | PrincipleOperation) -> ProcedureItem | PrincipleItem:
        world, grammar, task_type = group
        shared = {"world": world, "grammar": grammar, "round": self._report.round}
        if isinstance(operation, ProcedureOperation):
            return ProcedureItem(
                **shared,  # type: ignore[arg-type]
                task_type=task_type,
                builder=f"{self._model.name} {instructions('procedures').label}",
                when=_phrase(operation.when),
                steps=_phrases(operation.steps),
                pitfalls=_phrases(operation.pitfalls),
            )
        return PrincipleItem(
            **shared,  # type: ignore[arg-type]
            task_type="" if operation.any_task_type else task_type,
            builder=f"{self._model.name} {instructions('principles').label}",
            condition=_phrase(operation.condition),
            guidance=_phrase(operation.guidance),
            expected_effect=_phrase(operation.expected_effect),
            mechanism=_phrase(operation.mechanism),
            scope=_phrase(operation.scope),
            exceptions=_phrases(operation.exceptions),
        )

    # ---- harm and predicates

    def _own_principles(self) -> list[Stored]:
        """Candidates of a language model without a predicate."""
        return [
            stored
            for stored in self._store.items(3, statuses=["candidate"])
            if stored.item.builder != "offline" and isinstance(stored.item, PrincipleItem) and not stored.item.predicate
        ]

    def _judge_harm(self) -> None:
        prompt = instructions("harm")
        unjudged = [stored for stored in self._own_principles() if not self._store.judgements(stored.id, "harm")]
        questions, shown = [], []
        for stored in unjudged:
            attempts = self._attempts_of(stored)
            shown.append(attempts)
            questions.append(self._harm_question(prompt, stored, attempts))
        for stored, attempts, answer in zip(unjudged, shown, self._ask(questions), strict=True):
            if answer is None:
                continue
            good = [citation for citation in answer.evidence if not check_citation(citation, attempts)]
            for citation in answer.evidence:
                if wrong := check_citation(citation, attempts):
                    self._refuse(f"harm of {stored.id}", f"evidence: {wrong}")
            harmful = answer.harmful and bool(good)
            if answer.harmful and not good:
                self._refuse(f"harm of {stored.id}", "harmful without a step that shows it; taken for harmless")
            verdict: dict[str, Any] = {
                "harmful": harmful,
                "why": answer.why,
                "evidence": [
                    {"trajectory": attempts[cited.episode].trajectory.id, "step": cited.step, "quote": cited.quote}
                    for cited in good
                ],
                "by": f"{self._model.name} {prompt.label}",
            }
            self._store.judge(stored.id, "harm", verdict, self._report.round)
            self._report.judged["harmful" if harmful else "harmless"] += 1

    def _harm_question(
        self, prompt: Instructions, stored: Stored, attempts: dict[str, Attempt]
    ) -> _Question[HarmAnswer]:
        def check(answer: HarmAnswer) -> list[str]:
            problems = [problem for citation in answer.evidence if (problem := check_citation(citation, attempts))]
            if answer.harmful and not answer.evidence:
                problems.append("Harmful needs evidence; cite a step, or say false.")
            return problems

        assert isinstance(stored.item, PrincipleItem)
        return _Question(
            f"harm of {stored.id}", prompt.messages(harm_material(stored.item, attempts)), HarmAnswer, check
        )

    def _propose_predicates(self) -> None:
        prompt = instructions("predicate")
        wanted: list[tuple[Stored, dict[str, Any]]] = []
        for stored in self._own_principles():
            judgements = self._store.judgements(stored.id, "harm")
            if judgements and judgements[-1].verdict.get("harmful") and stored.id not in self._shown["predicate"]:
                wanted.append((stored, judgements[-1].verdict))
        questions = [self._predicate_question(prompt, stored, verdict) for stored, verdict in wanted]
        for (stored, verdict), answer in zip(wanted, self._ask(questions), strict=True):
            if answer is None:
                continue
            assert isinstance(stored.item, PrincipleItem)
            where = f"predicate of {stored.id}"
            before, self._wrote = len(self._report.refused), []
            wrong = self._compile_problem(answer)
            if not answer.trigger.strip():
                self._report.judged["no check possible"] += 1
            elif wrong:
                self._refuse(where, wrong)
            else:
                predicate = Predicate(trigger=answer.trigger, requirement=answer.requirement)
                item = stored.item.model_copy(
                    update={"predicate": predicate, "builder": f"{stored.item.builder} {prompt.label}"}
                )
                harm = {**verdict, "judged": stored.id}
                if self._write(where, item, _carried(self._store, [stored], item.id), kind="predicate", harm=harm):
                    self._replace(where, item.id, [stored], f"now {item.id}, with a predicate")
            group = (stored.item.world, stored.item.grammar, stored.item.task_type)
            self._note("predicate", prompt, group, [stored.id], answer, self._report.refused[before:])

    def _predicate_question(
        self, prompt: Instructions, stored: Stored, verdict: dict[str, Any]
    ) -> _Question[PredicateAnswer]:
        assert isinstance(stored.item, PrincipleItem)
        item = stored.item
        material = predicate_material(item, self._action_forms(item.grammar), verdict["why"], self._attempts_of(stored))

        def check(answer: PredicateAnswer) -> list[str]:
            wrong = self._compile_problem(answer)
            return [wrong] if wrong else []

        return _Question(
            f"predicate of {stored.id}", prompt.messages(material), PredicateAnswer, check, self._settings.repairs
        )

    def _compile_problem(self, answer: PredicateAnswer) -> str:
        if not answer.trigger.strip():
            return ""  # the model says that it cannot be checked
        try:
            compile_predicate(Predicate(trigger=answer.trigger, requirement=answer.requirement))
        except MemoryRecordError as error:
            return f"The predicate is refused: {error}."
        return ""

    def _attempts_of(self, stored: Stored) -> dict[str, Attempt]:
        """The attempts that a principle's links cite, in the order of citing."""
        cited = [item.trajectory for link in self._store.links(upper=stored.id) for item in link.evidence]
        known = [id for id in dict.fromkeys(cited) if id in self._telling][:_HARM_ATTEMPTS]
        return {f"E{number}": self._attempt(self._telling[id]) for number, id in enumerate(known, 1)}

    # ---- what the stages share

    def _own_episodes(self) -> list[_StoredEpisode]:
        """Episodes that a language model told, in insertion order (an offline builder may have told of the same)."""
        return [
            _StoredEpisode(stored.item, stored.status)
            for stored in self._store.items(1)
            if isinstance(stored.item, EpisodeItem) and stored.item.builder != "offline"
        ]

    def _known(self, level: int, group: Group, letter: str) -> dict[str, Stored]:
        """The items in use of a group by alias, those of highest utility first; rejected principles come last."""
        world, grammar, task_type = group
        found = [
            stored
            for stored in self._store.items(level, world=world, grammar=grammar, task_type=task_type)
            if stored.status != "retired"
        ]
        found.sort(key=lambda stored: (stored.status == "rejected", -utility(stored.ledger)))
        return {f"{letter}{n}": stored for n, stored in enumerate(found[: self._settings.items_per_prompt], 1)}

    def _rows(self, known: dict[str, Stored]) -> list[tuple[str, Any, str]]:
        rows = []
        counts = self._store.count_links([stored.id for stored in known.values()])
        for alias, stored in known.items():
            for_, against = (counts[stored.id].get(relation, 0) for relation in ("supports", "contradicts"))
            standing = f"{stored.status}, supported {for_}x, contradicted {against}x"
            if stored.status == "rejected":
                standing += f": {stored.reason}"
            rows.append((alias, stored.item, standing))
        return rows

    def _action_forms(self, grammar: str) -> tuple[str, ...]:
        """The forms that predicates will see, learnt as a guide learns them, without those of an agent's slips."""
        if grammar not in self._forms:
            sample = list(islice(self._store.trajectories(grammar=grammar), GRAMMAR_TRAJECTORIES))
            learnt = fit_grammar(sample)
            taken: Counter[str] = Counter()
            for trajectory in sample:
                taken.update(learnt.parse(s.action)[0] for s in trajectory.steps if s.action and s.valid is not False)
            self._forms[grammar] = tuple(form for form in learnt.templates if taken[form] >= _FORM_USES)
        return self._forms[grammar]

    def _ask(self, questions: Sequence[_Question[A]]) -> Iterator[A | None]:
        """The answers in order; None where there is none, which is reported."""
        with ThreadPoolExecutor(self._model.settings.concurrency) as pool:
            try:
                yield from pool.map(self._try, questions)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _try(self, question: _Question[A]) -> A | None:
        if self._report.stopped:
            return None
        try:
            answer = self._model.structured(question.messages, question.schema, question.check, question.reasks)
        except BudgetSpent as spent:
            self._report.stopped = str(spent)
            return None
        except (UnusableAnswer, RequestRefused) as fault:
            self._report.faults.append(Refusal(question.where, str(fault)))
            return None
        except LanguageModelFault as fault:
            self._report.faults.append(Refusal(question.where, str(fault)))
            self._failures += 1
            if self._failures >= _FAULTS_IN_A_ROW:
                self._report.failed = True
                self._report.stopped = f"{self._failures} requests failed one after the other, last with: {fault}"
            return None
        self._failures = 0
        return answer

    def _write(
        self, where: str, item: Any, links: Sequence[Link], kind: str = "", harm: dict[str, Any] | None = None
    ) -> bool:
        """Write an item with its links and its judgement of harm; whether it is now in use."""
        kind = kind or type(item).__name__.removesuffix("Item").lower()
        written = self._store.write([item], links, {} if harm is None else {item.id: harm})
        for id, reason in written.rejected:
            self._refuse(where, f"{id}: {reason}")
        if item.id in written.accepted:
            self._report.written[kind] += 1
            self._wrote.append(item.id)
            return True
        if item.id not in written.known:
            return False
        stored = self._store.item(item.id)
        self._report.known[kind] += 1
        if stored.status in ("retired", "rejected"):
            self._refuse(where, f"{item.id} was {stored.status}: {stored.reason}")
            return False
        return True

    def _link(self, where: str, links: Sequence[Link]) -> bool:
        written = self._store.write([], links)
        for id, reason in written.rejected:
            self._refuse(where, f"{id}: {reason}")
        return len(written.rejected) < len(links)

    def _replace(self, where: str, new: str, targets: Sequence[Stored], reason: str) -> None:
        """Retire ``targets`` in favour of ``new``, and rest on it what rested on them."""
        for target in targets:
            if target.id == new:
                continue
            above = [link.model_copy(update={"lower": new}) for link in self._store.links(lower=target.id)]
            if above:
                self._store.write([], above)
            self._retire(where, target, reason)

    def _retire(self, where: str, target: Stored, reason: str) -> bool:
        if target.status in _PROTECTED:
            self._refuse(where, f"{target.id} is {target.status}: it stays, whatever the model says of it")
            return False
        self._store.set_status(target.id, "retired", reason, self._report.round)
        return True

    def _refuse(self, where: str, reason: str) -> None:
        self._report.refused.append(Refusal(where, reason))

    def _note(
        self, stage: str, prompt: Instructions, group: Group, ids: list[str], answer: BaseModel, refused: list[Refusal]
    ) -> None:
        """Write to the journal what a stage was shown, and what came of it."""
        line = {
            "stage": stage,
            "prompt": prompt.label,
            "model": self._model.name,
            "round": self._report.round,
            "group": list(group),
            "shown": ids,
            "wrote": self._wrote,
            "answer": answer.model_dump(mode="json"),
            "refused": [f"{item.where}: {item.reason}" for item in refused],
        }
        self._append(line)
        self._wrote = []
        self._shown[stage].update(ids)

    def _wait(self, stage: str, ids: list[str]) -> None:
        """Note what found no answer and waits for the next build (a build that has stopped did not ask)."""
        if not self._report.stopped:
            self._append({"stage": f"unanswered {stage}", "round": self._report.round, "shown": ids})
            self._shown[f"unanswered {stage}"].update(ids)

    def _append(self, line: dict[str, Any]) -> None:
        self._journal.parent.mkdir(parents=True, exist_ok=True)
        with self._journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _attempt(self, episode: EpisodeItem) -> Attempt:
        return Attempt(episode, self._store.trajectory(episode.trajectory))

    def _read_journal(self) -> dict[str, set[str]]:
        """What each stage was shown; a line counts if what it wrote is in this memory (it may be another, or an older
        copy: then the stage is shown its material again, and the cache answers)."""
        shown: dict[str, set[str]] = defaultdict(set)
        if not self._journal.is_file():
            return shown
        *lines, last = self._journal.read_text(encoding="utf-8").split("\n")
        if last:  # a kill cut it
            self._journal.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        entries: list[tuple[str, list[str], list[str]]] = []
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                entries.append((entry["stage"], entry["shown"], entry.get("wrote", [])))
            except (ValueError, KeyError, TypeError):
                raise MemoryRecordError(
                    f"{self._journal}: line {number} is damaged; remove it (its episodes are then shown again)"
                ) from None
        ids = {id for _, _, wrote in entries for id in wrote}
        known = self._store.find(ids)
        if ids and not known:
            self._tell(f"{self._journal} is of another memory: everything is shown anew")
            return shown
        for stage, seen, wrote in entries:
            if all(id in known for id in wrote):
                shown[stage].update(seen)
        return shown


@dataclass(frozen=True)
class _StoredEpisode:
    item: EpisodeItem
    status: str

    @property
    def id(self) -> str:
        return self.item.id


def _phrase(text: str) -> str:
    """Without white space around it and a final full stop: records are joined into sentences."""
    return text.strip().removesuffix(".")


def _phrases(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(_phrase(text) for text in texts if text.strip())


def _where(stage: str, group: Group) -> str:
    return f"{stage} of {'/'.join(part for part in group if part)}"


def _evidence(trajectory: Trajectory, step: int, quote: str) -> Evidence | None:
    """None: no evidence at all, whatever the trajectory holds."""
    return Evidence(trajectory=trajectory.id, step=step, quote=quote) if step >= 0 and quote.strip() else None


def _carried(store: Store, targets: Sequence[Stored], upper: str) -> list[Link]:
    """The links of ``targets``, for what takes their place: what supports them, and what contradicts them."""
    return [
        link.model_copy(update={"upper": upper})
        for target in targets
        for link in store.links(upper=target.id)
        if target.id != upper
    ]
