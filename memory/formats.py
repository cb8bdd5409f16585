"""Outside rollouts as trajectories (level 0): plain-text transcripts and chat-style messages, a JSON value each.

Two formats, told apart by their keys, in ``.json`` (a list or one episode) or ``.jsonl`` files, either of them also
compressed (``.gz``, ``.xz``):

- **Transcript** ``{"name", "result", "traj"}``: ``name`` is the game's folder, whose part before the first ``-`` is the
  task type; ``result`` a boolean or 0/1; ``traj`` the first observation with the task, then ``> Think: …``,
  ``> ActionPath: …`` and ``> action`` lines, each action followed by the world's answer (KnowAgent, arXiv 2403.03101).
- **Chat** ``{"messages": [{"role", "content"}]}`` or ``{"conversations": [{"from", "value"}]}`` (AgentGym, arXiv
  2406.04151; ETO, arXiv 2403.02502): the agent answers ``Thought: … Action: …``, or with ``<think>`` and ``<action>``
  tags, or with the bare action on one line. Opening messages up to the first answer that holds an action are
  instructions, except for the one that it answers, which is the first observation.

Every episode that is JSON of one of these forms becomes a trajectory: what breaks off is ``truncated``, what deviates
is ``odd``, and the note says how. What is no such JSON is reported with its place. Text is untrusted: it is only split.
"""

from __future__ import annotations

import gzip
import json
import lzma
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memory.records import MemoryRecordError, TraceStep, Trajectory, TrajectoryStatus


@dataclass(frozen=True)
class Labels:
    """What a file does not say of its episodes.

    ``refusals``: how the world's answer to an action that it refused begins; (): not known, and ``valid`` is None.
    ``task_type`` and ``success`` stand in where an episode states none (a file of demonstrations, for example).
    """

    world: str
    grammar: str
    refusals: tuple[str, ...] = ()
    agent: str = ""
    task_type: str = ""
    success: bool | None = None
    round: int = 0


@dataclass(frozen=True)
class Problem:
    """An entry that is no episode: where it stands, and why."""

    source: str
    reason: str


@dataclass(frozen=True)
class Parsed:
    """``trajectories`` in file order; ``problems``: the entries that are none."""

    trajectories: list[Trajectory] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def read_rollouts(path: Path, labels: Labels) -> Parsed:
    """The episodes of the file ``path``; their source is ``<file name>#<entry>``, counted from 1.

    Raises:
        MemoryRecordError: there is no such file, it is damaged, no text, or holds nothing at all.
    """
    if not path.is_file():
        raise MemoryRecordError(f"rollout file {path} does not exist; give a .json or .jsonl file (or .gz, .xz of one)")
    try:
        data = path.read_bytes()
        if path.suffix == ".xz":
            data = lzma.decompress(data)
        elif path.suffix == ".gz":
            data = gzip.decompress(data)
        text = data.decode()
    except (OSError, EOFError, lzma.LZMAError, ValueError) as error:
        raise MemoryRecordError(f"rollout file {path} cannot be read ({error}); fetch it again") from None
    return parse_rollouts(text, path.name, labels)


def parse_rollouts(text: str, name: str, labels: Labels) -> Parsed:
    """The episodes in ``text``, the content of a file called ``name``. Raises MemoryRecordError: it holds none."""
    parsed = Parsed()
    for number, entry in _entries(text):
        source = f"{name}#{number}"
        try:
            parsed.trajectories.append(parse_episode(entry, source, labels))
        except MemoryRecordError as error:
            parsed.problems.append(Problem(source, str(error)))
    if not parsed.trajectories and not parsed.problems:
        raise MemoryRecordError(f"rollout file {name} is empty; it holds no episode")
    return parsed


def parse_episode(entry: Any, source: str, labels: Labels) -> Trajectory:
    """One episode of either format. Raises MemoryRecordError: ``entry`` is no episode."""
    if isinstance(entry, _NotJson):
        raise MemoryRecordError(f"not JSON ({entry.reason})")
    if isinstance(entry, list):
        entry = {"messages": entry}
    if not isinstance(entry, dict):
        raise MemoryRecordError(f"a JSON {type(entry).__name__} where an episode is expected")
    entry = clean(entry)
    if isinstance(entry.get("traj"), str):
        return parse_transcript(entry, source, labels)
    for key in ("messages", "conversations", "conversation"):
        if isinstance(entry.get(key), list) and any(map(_is_message, entry[key])):
            return parse_chat(entry, entry[key], source, labels)
    keys = ", ".join(sorted(map(str, entry))) or "none"
    raise MemoryRecordError(f"keys {keys}: neither a text traj nor messages with roles")


def clean(value: Any) -> Any:
    """``value`` without what no database takes as text: lone surrogates and NUL become a replacement character."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
    if isinstance(value, list):
        return [clean(item) for item in value]
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items()}
    return value


@dataclass(frozen=True)
class _NotJson:
    reason: str


def _entries(text: str) -> Iterable[tuple[int, Any]]:
    """Numbered episodes: the items of a JSON list, one JSON object, or one JSON value a line."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except (ValueError, RecursionError) as error:
                    yield number, _NotJson(str(error))
        return
    if isinstance(whole, list) and not (whole and all(map(_is_message, whole))):
        yield from enumerate(whole, 1)
    else:
        yield 1, whole


@dataclass
class _Turn:
    """What the agent wrote and the world answered, as a parser gathers it. ``result`` None: no answer."""

    thought: str
    action: str | None
    result: str | None = None


_COMMAND = re.compile(r">[ \t]?(.*)")
_THOUGHT_LINE = re.compile(r"Think:[ \t]*")
_PATH_LINE = re.compile(r"ActionPath:")


def parse_transcript(entry: dict[str, Any], source: str, labels: Labels) -> Trajectory:
    """One episode of the transcript format (see the module). A trailing thought becomes a step without an action."""
    oddities: list[str] = []
    opening: list[str] = []
    turns: list[_Turn] = []
    thoughts: list[str] = []
    lines = entry["traj"].rstrip().split("\n")
    asked = False  # whether the last of turns is waiting for (more of) its answer
    for line in lines:
        command = _COMMAND.fullmatch(line)
        if command is None:
            if asked:
                turns[-1].result = line if turns[-1].result is None else f"{turns[-1].result}\n{line}"
            elif thoughts:
                thoughts.append(line)
                if line.strip():
                    oddities.append(f"text after a thought: {line[:60]!r}")
            else:
                opening.append(line)
            continue
        said = command[1].strip()
        if _THOUGHT_LINE.match(said) or _PATH_LINE.match(said):
            thoughts.append(_THOUGHT_LINE.sub("", said, count=1))
            asked = False
            continue
        if not said:
            oddities.append(f"step {len(turns)}: an empty action")
        turns.append(_Turn("\n".join(thoughts), said or None))
        thoughts, asked = [], True
    if thoughts:
        turns.append(_Turn("\n".join(thoughts), None))
    name = str(entry.get("name", ""))
    return _trajectory(
        entry, source, labels, name, name.partition("-")[0] if "-" in name else "", "\n".join(opening), turns, oddities
    )


_ROLES = {"assistant": True, "gpt": True, "agent": True, "model": True, "bot": True}
_TAGGED_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL | re.IGNORECASE)
_TAGGED_THOUGHT = re.compile(r"<think(?:ing)?>(.*?)</think(?:ing)?>", re.DOTALL | re.IGNORECASE)
_ACTION = re.compile(r"^[ \t]*\**action\**[ \t]*:\**[ \t]*\n?[ \t]*(\S[^\n]*)", re.MULTILINE | re.IGNORECASE)
_THOUGHT = re.compile(r"\A\s*\**thought\**[ \t]*:\**\s*", re.IGNORECASE)
_OBSERVATION = re.compile(r"\A\s*observation[ \t]*:[ \t]*", re.IGNORECASE)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and ("role" in value or "from" in value) and ("content" in value or "value" in value)


def parse_reply(text: str) -> tuple[str, str | None]:
    """(thought, action) of an agent's message; the last ``Action:`` counts. Action None: the message holds none."""
    tagged = _TAGGED_ACTION.search(text)
    if tagged:
        thoughts = "\n".join(part.strip() for part in _TAGGED_THOUGHT.findall(text))
        return thoughts or text[: tagged.start()].strip(), tagged[1].strip() or None
    found = list(_ACTION.finditer(text))
    if found:
        return _THOUGHT.sub("", text[: found[-1].start()]).strip(), found[-1][1].strip()
    line = text.strip()
    if line and "\n" not in line and not _THOUGHT.match(line):
        return "", line
    return _THOUGHT.sub("", line), None


def parse_chat(entry: dict[str, Any], messages: list[Any], source: str, labels: Labels) -> Trajectory:
    """One episode of the chat format (see the module)."""
    oddities: list[str] = []
    spoken: list[tuple[bool, str]] = []
    for number, message in enumerate(messages):
        if not _is_message(message):
            oddities.append(f"message {number} has no role and text")
            continue
        said = message.get("content", message.get("value"))
        if isinstance(said, list):  # content in parts
            said = "\n".join(str(part.get("text", "")) for part in said if isinstance(part, dict))
        role = str(message.get("role", message.get("from"))).lower()
        spoken.append((role in _ROLES, said if isinstance(said, str) else ""))
    marked = [bool(_ACTION.search(text) or _TAGGED_ACTION.search(text)) for mine, text in spoken if mine]
    replies = -1
    opening: list[str] = []
    turns: list[_Turn] = []
    for mine, text in spoken:
        if mine:
            replies += 1
            # "OK" to the instructions is no action where the others say "Action:".
            if not turns and any(marked) and not any(marked[: replies + 1]):
                opening = []
                continue
            turns.append(_Turn(*parse_reply(text)))
        elif not turns:
            opening.append(text)
        elif turns[-1].result is None:
            turns[-1].result = _OBSERVATION.sub("", text)
        else:
            turns[-1].result = f"{turns[-1].result}\n{text}"
    first = _OBSERVATION.sub("", "\n".join(opening[-1:]))
    task = next((str(entry[key]) for key in _TASK_KEYS if isinstance(entry.get(key), str | int)), "")
    entry = entry if _goal(first) or not opening else {"goal": _goal("\n".join(opening)), **entry}
    return _trajectory(entry, source, labels, task, "", first, turns, oddities)


_TASK_KEYS = ("task", "task_id", "item_id", "game_file", "game", "name", "id")
_OUTCOME_KEYS = ("success", "won", "result", "is_success")
_SCORE_KEYS = ("score", "reward", "final_reward")
_TASK_LINE = re.compile(r"your task is to:?[ \t]*([^\n]+)", re.IGNORECASE)
_GOAL_LINE = re.compile(r"^[ \t]*(?:task|goal|instruction)(?: description)?[ \t]*:\s*([^\n]+)", re.I | re.M)


def _goal(text: str) -> str:
    found = _TASK_LINE.search(text) or _GOAL_LINE.search(text)
    return found[1].strip().removesuffix(".") if found else ""


def _trajectory(
    entry: dict[str, Any],
    source: str,
    labels: Labels,
    task: str,
    task_type: str,
    opening: str,
    turns: list[_Turn],
    oddities: list[str],
) -> Trajectory:
    success, score = _outcome(entry, labels, oddities)
    steps = []
    observation = opening
    for index, turn in enumerate(turns):
        result = (turn.result or "").rstrip()
        valid = None
        if turn.result is not None and labels.refusals:
            valid = turn.action is not None and not result.startswith(labels.refusals)
        last = index == len(turns) - 1
        steps.append(
            TraceStep(
                index=index,
                observation=observation,
                thought=turn.thought,
                action=turn.action,
                result=result,
                valid=valid,
                reward=score if last else 0.0,  # the source states the outcome alone
            )
        )
        observation = result
    status: TrajectoryStatus = "complete"
    if not turns:
        oddities.append("no step")
    elif turns[-1].action is None and turns[-1].result is None:
        status = "truncated"
        oddities.insert(0, f"breaks off in step {len(turns) - 1}, before its action")
    elif turns[-1].result is None and success is None:
        status = "truncated"
        oddities.insert(0, f"breaks off after the action of step {len(turns) - 1}, with no outcome stated")
    if not opening.strip():
        oddities.append("no first observation")
    goal = entry.get("goal") if isinstance(entry.get("goal"), str) else _goal(opening)
    if not goal:
        oddities.append("no goal found")
    if success is None and status == "complete":
        oddities.append("no outcome stated")
    if oddities and status == "complete":
        status = "odd"
    stated = entry.get("task_type")
    return Trajectory(
        source=source,
        world=labels.world,
        grammar=labels.grammar,
        task=task or source,
        task_type=stated if isinstance(stated, str) and stated else task_type or labels.task_type,
        goal=goal or "",
        agent=labels.agent,
        success=success,
        score=score,
        status=status,
        note="; ".join(oddities),
        round=labels.round,
        steps=tuple(steps),
    )


def _outcome(entry: dict[str, Any], labels: Labels, oddities: list[str]) -> tuple[bool | None, float]:
    """(success, score in [0, 1]) as the episode states them; scores over 1 count as out of 100."""
    success: bool | None = None
    stated = next((key for key in _OUTCOME_KEYS if entry.get(key) is not None), None)
    if stated is not None:
        if entry[stated] in (0, 1):  # booleans too
            success = bool(entry[stated])
        else:
            oddities.append(f"{stated} is {str(entry[stated])[:40]!r}, neither true nor false")
    score: float | None = None
    stated = next((key for key in _SCORE_KEYS if entry.get(key) is not None), None)
    if stated is not None:
        value = entry[stated]
        if isinstance(value, int | float) and math.isfinite(value) and abs(value) <= 100:
            score = max(0.0, value / 100 if value > 1 else float(value))
        else:
            oddities.append(f"{stated} is {str(value)[:40]!r}, no number up to 100")
    if success is None:
        success = score >= 1 if score is not None else labels.success
    return success, score if score is not None else float(bool(success))
