from collections.abc import Sequence

import pytest

from envs.base import ExpertMove, StepResult, Task, TextEnv

pytestmark = pytest.mark.unit


class Counter(TextEnv):
    """Scores what the action says; 'win' wins, 'end' ends."""

    def _reset(self, task: Task, seed: int) -> StepResult:
        return StepResult("start", score=0.1, goal="count")

    def _step(self, action: str) -> StepResult:
        if action in ("win", "end"):
            return StepResult("over", score=1.0 if action == "win" else 0.0, done=True, won=action == "win")
        return StepResult("on", score=float(action))

    def admissible(self) -> Sequence[str]:
        return ["end", "win"]

    def expert(self) -> ExpertMove:
        return ExpertMove("win")

    def close(self) -> None:
        return None


TASK = Task("household", "x", "t")


def test_reward_is_the_change_of_the_clamped_score() -> None:
    env = Counter(max_steps=9)
    assert env.reset(TASK).reward == 0.0
    assert env.step("0.5").reward == pytest.approx(0.4)
    result = env.step("-100")
    assert (result.score, result.reward) == (0.0, -0.5)
    assert env.step("7").score == 1.0


def test_step_cap() -> None:
    env = Counter(max_steps=2)
    env.reset(TASK)
    assert not env.step("0").done
    last = env.step("0")
    assert (last.done, last.truncated, last.won) == (True, True, False)
    with pytest.raises(RuntimeError, match="episode is over"):
        env.step("0")


@pytest.mark.parametrize(("action", "won"), [("win", True), ("end", False)])
def test_an_end_at_the_cap_is_no_truncation(action: str, won: bool) -> None:
    env = Counter(max_steps=1)
    env.reset(TASK)
    last = env.step(action)
    assert (last.done, last.truncated, last.won) == (True, False, won)


def test_misuse() -> None:
    with pytest.raises(ValueError, match="max_steps: 0"):
        Counter(max_steps=0)
    with pytest.raises(RuntimeError, match="call reset first"):
        Counter(max_steps=1).step("x")
