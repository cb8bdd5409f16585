"""Outside rollouts: transcripts and chats, whole, cut off and odd."""

from __future__ import annotations

import gzip
import json
import lzma
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.formats import Labels, parse_episode, parse_reply, parse_rollouts, read_rollouts
from memory.records import MemoryRecordError, Trajectory

pytestmark = pytest.mark.unit

LABELS = Labels("alfworld", "alfworld-0.3", refusals=("Nothing happens.",))

TRANSCRIPT = """\
You are in a room. You see a shelf 1 and a desk 1.
Your task is to: put some pen on desk.
> Think: First I need a pen.
> ActionPath: Start
> go to shelf 1
On the shelf 1, you see a pen 2.
> take pen 1 from shelf 1
Nothing happens.
> Think: It is pen 2.
> take pen 2 from shelf 1
You pick up the pen 2.
It is blue.
"""


def transcript(text: str = TRANSCRIPT, result: Any = True, name: str = "pick-Pen-None-Desk-3/trial_1") -> Trajectory:
    return parse_episode({"name": name, "result": result, "traj": text}, "file#1", LABELS)


def test_transcript_becomes_steps() -> None:
    trajectory = transcript()
    assert (trajectory.status, trajectory.note, trajectory.success, trajectory.score) == ("complete", "", True, 1.0)
    assert (trajectory.goal, trajectory.task_type) == ("put some pen on desk", "pick")
    first, second, third = trajectory.steps
    assert first.observation.endswith("Your task is to: put some pen on desk.")
    assert first.thought == "First I need a pen.\nActionPath: Start"
    assert [(s.action, s.valid) for s in trajectory.steps] == [
        ("go to shelf 1", True),
        ("take pen 1 from shelf 1", False),
        ("take pen 2 from shelf 1", True),
    ]
    assert second.observation == first.result == "On the shelf 1, you see a pen 2."
    assert third.result == "You pick up the pen 2.\nIt is blue."
    assert [s.reward for s in trajectory.steps] == [0.0, 0.0, 1.0]


def test_transcript_that_ends_with_a_thought_is_truncated_and_keeps_it() -> None:
    trajectory = transcript(TRANSCRIPT + "> Think: Now to the desk.\n", result=0)
    assert (trajectory.status, trajectory.success, trajectory.score) == ("truncated", False, 0.0)
    assert trajectory.note == "breaks off in step 3, before its action"
    assert (trajectory.steps[3].thought, trajectory.steps[3].action) == ("Now to the desk.", None)


@pytest.mark.parametrize(
    ("text", "result", "note"),
    [
        (TRANSCRIPT + "> \nNothing happens.\n", True, "step 3: an empty action"),
        (TRANSCRIPT + "> Think: hm\nstray\n> look\nok\n", True, "text after a thought: 'stray'"),
        (TRANSCRIPT, "maybe", "result is 'maybe', neither true nor false; no outcome stated"),
        ("A room.\n> look\nA room.", 1, "no goal found"),
        ("", False, "no step; no first observation; no goal found"),
    ],
)
def test_odd_transcripts_go_in_with_a_note(text: str, result: Any, note: str) -> None:
    trajectory = transcript(text, result)
    assert (trajectory.status, trajectory.note) == ("odd", note)


def test_a_bare_thought_keyword_is_what_the_agent_did() -> None:
    assert transcript(TRANSCRIPT + "> Think\nNothing happens.\n").steps[3].action == "Think"


CHAT = [
    {"from": "human", "value": "Interact with a household. Reply with Thought and Action."},
    {"from": "gpt", "value": "OK"},
    {"from": "human", "value": "You are in a room.\nYour task is to: find the pen."},
    {"from": "gpt", "value": "Thought:\nPens lie on desks.\n\nAction:\ngo to desk 1"},
    {"from": "human", "value": "Observation: Nothing happens."},
    {"from": "gpt", "value": "Thought: A drawer then.\nAction: open drawer 1"},
]


def test_chat_in_both_spellings() -> None:
    spelt = [
        {"role": {"human": "user", "gpt": "assistant"}[m["from"]], "content": [{"type": "text", "text": m["value"]}]}
        for m in CHAT
    ]
    shared = {"item_id": "alfworld_7", "reward": 1}
    one = parse_episode({**shared, "conversations": CHAT}, "f#1", LABELS)
    two = parse_episode({**shared, "messages": spelt}, "f#1", LABELS)
    assert one == two
    assert (one.task, one.goal, one.success, one.status) == ("alfworld_7", "find the pen", True, "complete")
    assert [(s.thought, s.action, s.result, s.valid) for s in one.steps] == [
        ("Pens lie on desks.", "go to desk 1", "Nothing happens.", False),
        ("A drawer then.", "open drawer 1", "", None),
    ]
    assert one.steps[0].observation.startswith("You are in a room.")


def test_chat_without_an_outcome_is_truncated_or_labelled() -> None:
    bare = parse_episode(CHAT, "f#1", LABELS)
    assert (bare.success, bare.status) == (None, "truncated")
    told = parse_episode(CHAT, "f#1", Labels("alfworld", "g", success=True, task_type="find"))
    assert (told.success, told.score, told.status, told.task_type) == (True, 1.0, "complete", "find")
    assert told.steps[0].valid is None  # no refusals were named


def test_goal_from_the_instructions_and_bare_actions() -> None:
    messages = [
        {"role": "system", "content": "Task: find the pen."},
        {"role": "user", "content": "A room."},
        {"role": "assistant", "content": "look"},
        {"role": "user", "content": "A pen."},
    ]
    trajectory = parse_episode({"messages": messages, "score": 40}, "f#1", LABELS)
    assert (trajectory.goal, trajectory.success, trajectory.score) == ("find the pen", False, 0.4)
    assert (trajectory.steps[0].observation, trajectory.steps[0].action) == ("A room.", "look")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Thought: a\nAction: b", ("a", "b")),
        ("<think>a</think>\n<action>b</action>", ("a", "b")),
        ("Action: a\nAction: b", ("Action: a", "b")),
        ("look", ("", "look")),
        ("I am not sure.\nPerhaps.", ("I am not sure.\nPerhaps.", None)),
        ("Thought: a", ("a", None)),
        ("", ("", None)),
    ],
)
def test_replies(text: str, expected: tuple[str, str | None]) -> None:
    assert parse_reply(text) == expected


def test_what_is_no_episode_is_reported_with_its_place() -> None:
    good = json.dumps({"name": "a-b", "result": 1, "traj": TRANSCRIPT})
    parsed = parse_rollouts(f'{good}\n{{"cut\n\n[1]\n{{"x": 1}}\n"s"\n{good}\n', "f.jsonl", LABELS)
    assert [t.source for t in parsed.trajectories] == ["f.jsonl#1", "f.jsonl#7"]
    assert [p.source for p in parsed.problems] == ["f.jsonl#2", "f.jsonl#4", "f.jsonl#5", "f.jsonl#6"]
    with pytest.raises(MemoryRecordError, match="empty"):
        parse_rollouts(" \n", "f.jsonl", LABELS)


def test_a_number_too_long_to_read_is_a_problem_of_its_entry() -> None:
    good = json.dumps({"name": "a-b", "result": 1, "traj": TRANSCRIPT})
    parsed = parse_rollouts(good + "\n1" + "0" * 5000, "f.jsonl", LABELS)
    assert ([p.source for p in parsed.problems], len(parsed.trajectories)) == (["f.jsonl#2"], 1)


@pytest.mark.parametrize("packed", ["f.json", "f.json.gz", "f.json.xz"])
def test_files(tmp_path: Path, packed: str) -> None:
    data = json.dumps([{"name": "a-b", "result": 1, "traj": TRANSCRIPT}] * 2).encode()
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(Path(packed).suffix, bytes)
    (tmp_path / packed).write_bytes(pack(data))
    assert [t.source for t in read_rollouts(tmp_path / packed, LABELS).trajectories] == [f"{packed}#1", f"{packed}#2"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "f.xz").write_bytes(lzma.compress(b"{}")[:-9])
    (tmp_path / "f.json").write_bytes(b"\xff\xfe{")
    for name in ("f.xz", "f.json", "none.json"):
        with pytest.raises(MemoryRecordError, match=name):
            read_rollouts(tmp_path / name, LABELS)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text() | st.just("> Think: \ud800\n> a\nb\0"),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["traj", "name", "result", "messages", "role", "from", "content", "value", "score", "goal"]
            ),
            inner,
            max_size=5,
        )
    ),
)


@given(JSON)
def test_no_json_crashes_the_parser(value: Any) -> None:
    try:
        trajectory = parse_episode(value, "f#1", LABELS)
    except MemoryRecordError:
        return
    assert 0 <= trajectory.score <= 1
    assert trajectory.id.startswith("t-")
    assert [s.index for s in trajectory.steps] == list(range(len(trajectory.steps)))
    assert trajectory.status == "complete" or trajectory.note


@pytest.mark.skipif("SAGA_ROLLOUTS" not in os.environ, reason="SAGA_ROLLOUTS names no folder of real rollouts")
def test_all_510_real_rollouts_go_in() -> None:
    parsed = read_rollouts(Path(os.environ["SAGA_ROLLOUTS"]) / "alfworld_llama2-13b.jsonl.xz", LABELS)
    assert not parsed.problems
    assert len({t.id for t in parsed.trajectories}) == 510
    assert sum(t.success is True for t in parsed.trajectories) == 134
    # Counted beside the parser: 238 files end with "> Think:" or "> ActionPath:", one holds the line "> ".
    assert Counter(t.status for t in parsed.trajectories) == {"complete": 271, "truncated": 238, "odd": 1}
    assert sum(s.action is not None for t in parsed.trajectories for s in t.steps) == 8999
    assert all(t.goal and t.task_type for t in parsed.trajectories)
