import gzip
import json
from pathlib import Path

import pytest

from train.trajectory import Context, Episode, Span, Step, TrajectoryError, append_episode, read_episodes

pytestmark = pytest.mark.unit


def episode(number: int) -> Episode:
    step = Step(index=0, observation="A room.", text="Action: look", action="look", result="A roöm.")
    context = Context(ids=[1, 2, 3], spans=[Span(start=1, end=3, step=0, logprobs=[-0.5, -0.25])])
    return Episode(
        id=f"p/{number}",
        phase="p",
        env="household",
        task="easy/1",
        task_type="t",
        seed=0,
        steps=[step],
        contexts=[context],
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "p.jsonl.gz"
    episodes = [episode(0), episode(1)]
    for item in episodes:
        append_episode(file, item)
    assert list(read_episodes(file)) == episodes
    # any gzip reader can read it
    with gzip.open(file, "rt") as lines:
        assert [json.loads(line)["id"] for line in lines] == ["p/0", "p/1"]


@pytest.mark.parametrize("lost", [1, 5, 40])
def test_a_torn_tail_is_named_and_cut_only_on_request(tmp_path: Path, lost: int) -> None:
    file = tmp_path / "p.jsonl.gz"
    append_episode(file, episode(0))
    whole = file.stat().st_size
    append_episode(file, episode(1))
    file.write_bytes(file.read_bytes()[:-lost])
    with pytest.raises(TrajectoryError, match=r"truncated in episode 2 .* the 1 before it are whole"):
        list(read_episodes(file))
    assert [item.id for item in read_episodes(file, repair=True)] == ["p/0"]
    assert file.stat().st_size == whole
    append_episode(file, episode(2))
    assert [item.id for item in read_episodes(file)] == ["p/0", "p/2"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"hello", "episode 1 .* is not gzip data"),
        (gzip.compress(b"{]\n"), "episode 1 is not JSON"),
        (gzip.compress(b'{"schema_version": 99}\n'), "schema_version 99; this version reads 3"),
        (gzip.compress(b'{"schema_version": 3, "id": 3}\n'), "episode 1: id: Input should be a valid string"),
        (gzip.compress(b"[]\n"), "schema_version None"),
    ],
)
def test_damaged_files_name_file_and_episode(tmp_path: Path, data: bytes, message: str) -> None:
    file = tmp_path / "bad.jsonl.gz"
    file.write_bytes(data)
    with pytest.raises(TrajectoryError, match=message):
        list(read_episodes(file))
    assert file.read_bytes() == data


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TrajectoryError, match="does not exist"):
        list(read_episodes(tmp_path / "none.jsonl.gz"))
