from pathlib import Path

import pytest

from memory.usage import Check, Instantiation, MemoryUse, Recall, Regulation, Retrieved
from train.show import show_episode
from train.trajectory import Episode, Step, append_episode

pytestmark = pytest.mark.unit


def test_an_episode_shows_what_memory_gave_and_what_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [
        Retrieved(item="r-1", level=3, status="audited", similarity=0.5, task_type=0.3, utility=0.0, score=0.8),
        Retrieved(item="r-2", level=3, status="candidate", similarity=0.2, task_type=0.0, utility=0.1, score=0.3),
    ]
    use = MemoryUse(
        mode="full",
        snapshot="0123456789abcdef",
        plan="find the [mug]",
        retrieved=tuple(found),
        instantiations=(
            Instantiation(item="r-1", text="open the drawer first"),
            Instantiation(item="r-2", reason="another task"),
        ),
        tokens=12,
    )
    regulation = Regulation(
        proposals=("take mug 1 from drawer 1", None, "open drawer 1"),
        checks=(
            Check(item="r-1", attempt=0, outcome="violated"),
            Check(item="r-1", attempt=2, outcome="followed"),
        ),
        choice="resampled",
    )
    step = Step(
        index=0, observation="A room.", text="x", action="open drawer 1", result="It is open.", regulation=regulation,
        recall=Recall(snapshot="q-1", state=4, thought="open [here]", value=0.5, visits=2, mode="hint", followed=True),
    )  # fmt: skip
    file = tmp_path / "episodes" / "eval.jsonl.gz"
    append_episode(
        file,
        Episode(
            id="eval/0", phase="eval", env="household", task="easy/1", task_type="x", seed=0, steps=[step], memory=use
        ),
    )
    show_episode(tmp_path, "eval/0")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[3:] == [
        "memory full, snapshot 0123456789ab, 12 tokens shown",
        "plan: find the [mug]",
        "r-1 audited 0.80 (0.50 similarity, 0.30 type, 0.00 utility)",
        "open the drawer first",
        "r-2 candidate 0.30 (0.20 similarity, 0.00 type, 0.10 utility)",
        "suppressed: another task",
        "state 4 (+0.500): open [here] (hint, followed)",
        "take mug 1 from drawer 1: violates r-1",
        "played: resampled",
        "1 > open drawer 1",
        "It is open.",
        "failed (knowledge), score 0.00, 1 steps",
    ]
