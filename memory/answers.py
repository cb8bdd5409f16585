"""What a building language model answers: the schemas, how long their parts may be, and the longest answer of each.

Two bounds stand on every text and list. What an answer is *validated* by is fixed and wide. What the server is *sent*
is narrower, follows :class:`AnswerLimits`, and is meant to be enforced while the answer is decoded: then an answer ends
by itself within :func:`longest` tokens, whatever the model says.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from memory.expressions import MAX_SOURCE
from memory.settings import Settings


class AnswerLimits(Settings):
    """Limits that the server is asked to enforce while it decodes. The defaults leave a strong model room to spare."""

    characters: Annotated[int, Field(ge=20, le=600)] = 200
    """Most characters of a sentence. Quotes and actions have half of it, a judgement's reason twice, the two
    expressions of a predicate four times (1000 at most)."""
    items: Annotated[int, Field(ge=1, le=12)] = 8
    """Most entries of a list within an answer, where the schema says no fewer."""
    operations: Annotated[int, Field(ge=1, le=8)] = 4
    """Most operations of one answer."""


# ``share``: of AnswerLimits.characters; see :func:`bounded`.
Sentence = Annotated[str, Field(max_length=600), WithJsonSchema({"type": "string", "share": 1})]
Reason = Annotated[str, Field(max_length=1200), WithJsonSchema({"type": "string", "share": 2})]
Short = Annotated[str, Field(max_length=300), WithJsonSchema({"type": "string", "share": 0.5})]
Source = Annotated[
    str, Field(max_length=MAX_SOURCE), WithJsonSchema({"type": "string", "share": 4, "maxLength": MAX_SOURCE})
]
# A name or number that does not exist makes one claim wrong, and not the whole answer: validation lets it pass.
Alias = Annotated[str, Field(max_length=300), WithJsonSchema({"type": "string", "maxLength": 6})]
Step = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0, "maximum": 99999})]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Claim(_Answer):
    step: Step
    what: Sentence
    quote: Short


class EpisodeAnswer(_Answer):
    goal: Sentence
    key_steps: Annotated[list[Claim], Field(max_length=8, json_schema_extra={"minItems": 1})]
    obstacles: Annotated[list[Claim], Field(max_length=4)]


class Citation(_Answer):
    episode: Alias
    step: Step
    quote: Short


OperationName = Literal["add", "merge", "refine", "contradict", "retire"]


class Operation(_Answer):
    """What the two kinds of operations share; :attr:`is_text` says whether it brings a new text."""

    reason: Sentence
    operation: OperationName
    targets: Annotated[list[Alias], Field(max_length=8)]


class ProcedureOperation(Operation):
    when: Sentence
    steps: Annotated[list[Short], Field(max_length=12)]
    pitfalls: Annotated[list[Sentence], Field(max_length=6)]
    evidence: Annotated[list[Citation], Field(max_length=12)]

    @property
    def is_text(self) -> bool:
        return bool(self.when.strip() and any(step.strip() for step in self.steps))


class PrincipleOperation(Operation):
    procedures: Annotated[list[Alias], Field(max_length=8)]
    condition: Sentence
    guidance: Sentence
    expected_effect: Sentence
    mechanism: Sentence
    scope: Sentence
    exceptions: Annotated[list[Sentence], Field(max_length=4)]
    any_task_type: bool
    evidence: Annotated[list[Citation], Field(max_length=12)]

    @property
    def is_text(self) -> bool:
        return bool(self.condition.strip() and self.guidance.strip())


class ProcedureAnswer(_Answer):
    operations: Annotated[list[ProcedureOperation], Field(max_length=8)]


class PrincipleAnswer(_Answer):
    operations: Annotated[list[PrincipleOperation], Field(max_length=8)]


class HarmAnswer(_Answer):
    why: Reason
    evidence: Annotated[list[Citation], Field(max_length=6)]
    harmful: bool


class PredicateAnswer(_Answer):
    reason: Sentence
    trigger: Source
    requirement: Source


ANSWERS: dict[str, type[BaseModel]] = {
    "episode": EpisodeAnswer,
    "procedures": ProcedureAnswer,
    "principles": PrincipleAnswer,
    "harm": HarmAnswer,
    "predicate": PredicateAnswer,
}
"""The answer of each stage of a build, in the order of the stages."""


def bounded(answer: type[BaseModel], limits: AnswerLimits) -> dict[str, Any]:
    """The JSON schema of ``answer`` as the server is sent it: its texts and lists bounded by ``limits`` as well."""

    def bound(node: Any, name: str = "") -> Any:
        if isinstance(node, list):
            return [bound(value) for value in node]
        if not isinstance(node, dict):
            return node
        made = {key: bound(value, key) for key, value in node.items() if key != "share"}
        if "share" in node:
            made["maxLength"] = min(int(node["share"] * limits.characters), node.get("maxLength", MAX_SOURCE))
        if "maxItems" in node:
            made["maxItems"] = min(node["maxItems"], limits.operations if name == "operations" else limits.items)
        return made

    schema: dict[str, Any] = bound(answer.model_json_schema())
    return schema


def longest(schema: dict[str, Any]) -> int:
    """Tokens of the longest answer that ``schema`` allows, the end of the turn included.

    One token is taken for each character, and one space behind each comma and colon. A byte-level tokeniser never needs
    more for ASCII; only a text made of rare characters or escape sequences could.

    Raises:
        ValueError: a part of the schema has no bound.
    """
    return 1 + _characters(schema, schema.get("$defs", {}))


def _characters(node: dict[str, Any], definitions: dict[str, Any]) -> int:
    if "$ref" in node:
        return _characters(definitions[node["$ref"].rsplit("/", 1)[1]], definitions)
    if "enum" in node:
        return max(len(json.dumps(value)) for value in node["enum"])
    try:
        match node.get("type"):
            case "string":
                return int(node["maxLength"]) + 2
            case "boolean":
                return len("false")
            case "integer":
                return max(len(str(node["minimum"])), len(str(node["maximum"])))
            case "array":
                parts = [_characters(node["items"], definitions)] * int(node["maxItems"])
            case "object":
                parts = [
                    len(json.dumps(name)) + len(": ") + _characters(value, definitions)
                    for name, value in node["properties"].items()
                ]
            case other:
                raise ValueError(f"no bound is known of a value of type {other!r}")
    except KeyError as missing:
        raise ValueError(f"{missing} is missing in {node}") from None
    return len("[]") + sum(parts) + len(", ") * max(0, len(parts) - 1)
