"""ALFWorld: household tasks as text games, on the official data."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path

from envs.alfworld_data import alfworld_tasks, data_folder, game_file, read_footer
from envs.alfworld_engine import INVALID, AlfworldEngine
from envs.alfworld_expert import Prior, SearchExpert, compatible_prior, count_prior
from envs.base import EnvFault, ExpertMove, StepResult, Task, TaskError, TextEnv
from envs.cache import cache_folder

_GOAL = re.compile(r"Your task is to: (.*)")


class AlfworldEnv(TextEnv):
    """Official ALFWorld games. Task ids are ``<split>/<game>/<trial>``; a game's start is fixed, whatever the seed.

    Args:
        max_steps: step cap (50 in the literature).
        data: the folder that holds ``json_2.1.1``; None: environment variable ALFWORLD_DATA.

    Raises:
        TaskError: no data there.
    """

    expert_steps: int | None = None
    """Length of the stored walkthrough of the present game (a known solution, for SPL)."""

    def __init__(self, max_steps: int, data: Path | None = None) -> None:
        super().__init__(max_steps)
        self._data = data if data is not None else data_folder()
        self._engine = AlfworldEngine(cache=cache_folder() / "alfworld")
        self._opening = ""
        self._played: list[tuple[str, str]] = []
        self._expert: SearchExpert | None = None

    def _reset(self, task: Task, seed: int) -> StepResult:
        path = game_file(self._data, task.id)
        if task.sha256 is not None and task.sha256 != (found := hashlib.sha256(path.read_bytes()).hexdigest()):
            raise TaskError(f"task {task.id!r}: {path} has sha256 {found}, not {task.sha256}; fetch the data again")
        self._engine.load(path)
        self._opening, goal = split_opening(self._engine.reset())
        self._played = []
        self._expert = None
        self.expert_steps = len(self._engine.walkthrough) or None
        return StepResult(self._opening, goal=goal, inventory=self._engine.inventory)

    def _step(self, action: str) -> StepResult:
        observation = self._engine.step(action)
        self._played.append((action, observation))
        won = self._engine.won
        valid = observation != INVALID
        return StepResult(
            observation, score=float(won), done=won, won=won, valid=valid, inventory=self._engine.inventory
        )

    def admissible(self) -> list[str]:
        return self._engine.admissible

    def expert(self) -> ExpertMove:
        """The search expert's move: it knows only what was shown, and where things tend to be in training games."""
        if self._expert is None:
            try:
                self._expert = SearchExpert(self._opening, search_prior(self._data))
            except ValueError as error:
                raise EnvFault(f"expert: {error}") from error
        for action, observation in self._played:
            self._expert.observe(action, observation)
        self._played.clear()
        return self._expert.move()

    def close(self) -> None:
        self._engine.close()


def split_opening(text: str) -> tuple[str, str]:
    """The engine's first observation -> (the same without the banner above it, the task's instruction)."""
    goal = _GOAL.search(text)
    return text[text.find("You are ") :], goal[1] if goal else ""


@functools.cache
def search_prior(data: Path) -> Prior:
    """Where object types tend to be: counted over the training walkthroughs, else what ALFWorld's table allows.

    The counts are kept as JSON in the cache folder, because they need a look into 3,553 files.
    """
    train = data / "json_2.1.1" / "train"
    if not train.is_dir():
        return compatible_prior()
    key = hashlib.sha256(f"{train.resolve()} {len(os.listdir(train))}".encode()).hexdigest()[:16]
    cached = cache_folder() / f"alfworld-prior-{key}.json"
    if cached.is_file():
        return json.loads(cached.read_text())
    tasks = alfworld_tasks("train", data)
    prior = count_prior(read_footer(game_file(data, task.id)).get("walkthrough") or [] for task in tasks)
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=cached.parent, suffix=".json", delete=False) as file:
        json.dump(prior, file)
    os.replace(file.name, cached)  # whole or not at all, whatever other workers do at the same time
    return prior
