"""What the policy reads and how its answers are parsed: pure functions from text to text."""

from __future__ import annotations

import re
from collections.abc import Sequence

_HOUSEHOLD = """\
You act in a household, one action a turn. Actions (R: receptacle, O: object, each with its number, as mug 1):
go to R; open R; close R; take O from R; move O to R; clean O with R; heat O with R; cool O with R; use O; examine O; \
look; inventory
"Nothing happens." means not possible."""

_WORLDS = {
    "household": _HOUSEHOLD,
    "alfworld": _HOUSEHOLD,
    "scienceworld": """\
You act in a science laboratory, one action a turn. Actions:
open O; close O; activate O; deactivate O; connect O to O; disconnect O; use O; use O on O; look around; look at O; \
look in O; read O; move O to O; pick up O; put down O; pour O into O; dunk O into O; mix O; go to L; teleport to L; \
eat O; flush O; focus on O; wait; wait1; inventory
O is an object and L a location. Focus only on what the task asks for: a wrong focus ends the task.""",
    "jericho": """\
You play a text adventure, one command a turn, in short imperative English: go north; take lamp; open door; \
unlock door with key; put coin in box; look; inventory""",
}

PLAN_FORMAT = """\
Before you act, you write a plan: at most three short sentences that say what to look for, where, and what to do with \
it. Write the plan only, no action."""

PLAN_REQUEST = "\n\nWhat is your plan?"
"""Follows the first observation when a plan is asked for."""

NOTE_FORMAT = """\
You played a game and lost it. Before you play the same game again, you write a note to yourself: at most three short \
sentences that say what went wrong and what to do instead. Write the note only, no action."""

NOTE_REQUEST = "\n\nWhat is your note for the next try?"
"""Follows the transcript of a lost game when a note is asked for (Reflexion; Shinn et al. 2023)."""

NOTES_HEADER = "You played this game before and lost. Your notes:"
"""Begins the notes in the prompt of the next try."""

_FORMAT = "Reply with one line: Action: <action>"
_FORMAT_THOUGHTS = "Reply with two lines:\nThought: <one short sentence>\nAction: <action>"

MALFORMED = 'Your reply held no action. Write a line "Action: <action>".'
"""The answer to a reply without an action; the world is not asked and the turn counts as an invalid action."""

_ACTION = re.compile(r"^[ \t]*action[ \t]*:[ \t]*(\S.*?)[ \t]*$", re.IGNORECASE | re.MULTILINE)
_THOUGHT = re.compile(r"^\s*thought[ \t]*:[ \t]*(.*?)\s*$", re.IGNORECASE | re.DOTALL)


def system_prompt(world: str, *, thoughts: bool) -> str:
    """The instructions of ``world`` (household, alfworld, scienceworld, jericho) and the form of an answer."""
    return f"{_WORLDS[world]}\n{_FORMAT_THOUGHTS if thoughts else _FORMAT}"


def plan_prompt(world: str) -> str:
    """The system prompt of a plan: what can be done in ``world``, and what a plan is."""
    return f"{_WORLDS[world]}\n{PLAN_FORMAT}"


def note_prompt(world: str) -> str:
    """The system prompt of a note on a lost try: what can be done in ``world``, and what a note is."""
    return f"{_WORLDS[world]}\n{NOTE_FORMAT}"


def transcript(first: str, turns: Sequence[tuple[str, str]]) -> str:
    """A game as text: the first observation, then what was said and what the world answered."""
    return "\n".join([first, *(f"> {said}\n{answer}" for said, answer in turns)])


def notes_suffix(notes: Sequence[str]) -> str:
    """What follows the first observation of a further try: the notes on the lost ones, if there are any."""
    return "\n\n" + "\n".join([NOTES_HEADER, *(f"- {note}" for note in notes)]) if notes else ""


def admissible_suffix(admissible: Sequence[str] | None) -> str:
    """What follows an observation: the admissible actions where the configuration asks for them."""
    return "" if admissible is None else f"\nAdmissible actions: {'; '.join(admissible)}"


def memory_suffix(text: str) -> str:
    """What follows the first observation: the memory's text, if there is any."""
    return f"\n\n{text}" if text else ""


def recall_suffix(thought: str) -> str:
    """What follows an observation: the thought recalled for the state, where one is shown."""
    return f"\nWhat served best in such a state: {thought}" if thought else ""


def thought_opening(thought: str) -> str:
    """How a reply begins whose thought is given: the model goes on with the action."""
    return f"Thought: {thought}\nAction:" if thought else ""


def reply_text(action: str, thought: str | None) -> str:
    """The answer that :func:`parse_reply` reads back."""
    return f"Thought: {thought}\nAction: {action}" if thought else f"Action: {action}"


def parse_reply(text: str) -> tuple[str | None, str | None]:
    """Split a reply into (thought, action).

    The first ``Action:`` line is the action; None when there is none (malformed). What stands before it after
    ``Thought:`` is the thought; None when there is none.
    """
    found = _ACTION.search(text)
    before = text[: found.start()] if found else text
    thought = _THOUGHT.match(before)
    return (thought.group(1) or None) if thought else None, found.group(1) if found else None


def thin(actions: Sequence[str], limit: int) -> list[str]:
    """At most ``limit`` of ``actions``, evenly spaced in their order, so that no verb is favoured."""
    if len(actions) <= limit:
        return list(actions)
    return [actions[index * len(actions) // limit] for index in range(limit)]
