"""From the ``env`` section of a configuration to a text world."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from envs.base import TaskError, TextEnv


def make_env(spec: dict[str, Any]) -> TextEnv:
    """The world that ``spec`` (``config.env.model_dump(mode="json")``) describes.

    Worlds are imported here, each on demand: no one needs Java to play a household.

    Raises:
        TaskError: an unknown world, a missing package or missing data.
    """
    name, max_steps = spec["name"], spec["max_steps"]
    with packages_of(name):
        if name == "household":
            from envs.household import HouseholdEnv

            return HouseholdEnv(max_steps)
        if name == "alfworld":
            from envs.alfworld import AlfworldEnv

            return AlfworldEnv(max_steps)
        if name == "scienceworld":
            from envs.scienceworld import ScienceWorldEnv

            return ScienceWorldEnv(max_steps, simplification=spec["simplification"])
        if name == "jericho":
            from envs.jericho import JerichoEnv

            return JerichoEnv(max_steps, folder=Path(spec["folder"]))
    raise TaskError(f"env.name: {name!r} is no world; choose household, alfworld, scienceworld or jericho")


@contextmanager
def packages_of(world: str) -> Iterator[None]:
    """Turn a missing package inside the block into a TaskError that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        extra = "alfworld" if world == "household" else world  # one engine
        raise TaskError(
            f"env.name {world!r} needs the module {error.name!r}; pip install 'saga-agents[{extra}]'"
        ) from None
