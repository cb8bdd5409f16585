import io

import pytest
from rich.console import Console

from train.progress import progress, rate_text

pytestmark = pytest.mark.unit


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=False, width=200), out


@pytest.mark.parametrize(
    ("done", "total", "seconds", "expected"),
    [
        (0, 10, 5.0, ""),
        (20, 150, 10.0, "2.0/s, ETA 0:01:05"),
        (1, 3, 4.0, "4.0 s each, ETA 0:00:08"),
        (1, 31, 120.0, "2.0 min each, ETA 1:00:00"),
        (5, 5, 1.0, "5.0/s, ETA 0:00:00"),
    ],
)
def test_rate_and_time_left(done: int, total: int, seconds: float, expected: str) -> None:
    assert rate_text(done, total, seconds) == expected


def test_plain_lines_come_at_most_every_ten_seconds_and_once_at_the_end() -> None:
    console, out = plain()
    clock = Clock()
    with progress(40, "rollouts", console=console, clock=clock) as bar:
        for second in range(25):
            clock.now = 101.0 + second
            bar.advance(won=second / 10)
    assert out.getvalue().splitlines() == [
        "rollouts: 10/40  1.0/s, ETA 0:00:30  won 0.9",
        "rollouts: 20/40  1.0/s, ETA 0:00:20  won 1.9",
        "rollouts: 25/40  1.0/s, ETA 0:00:15  won 2.4",
    ]


def test_nothing_is_printed_when_nothing_was_done() -> None:
    console, out = plain()
    with progress(0, "rollouts", console=console):
        pass
    assert out.getvalue() == ""


def test_a_failing_block_is_not_swallowed() -> None:
    console, _ = plain()
    with pytest.raises(RuntimeError, match="boom"), progress(2, "x", console=console):
        raise RuntimeError("boom")


def test_a_terminal_gets_a_bar_with_count_rate_and_figures() -> None:
    out = io.StringIO()
    clock = Clock()
    console = Console(file=out, force_terminal=True, width=120)
    with progress(8, "rollouts", console=console, clock=clock) as bar:
        clock.now = 102.0
        bar.advance(4, success=0.25)
    text = out.getvalue()
    assert "rollouts" in text
    assert "4/8" in text
    assert "2.0/s, ETA 0:00:02" in text
    assert "success 0.25" in text
