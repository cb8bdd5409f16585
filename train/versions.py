"""The adapter versions of a run: which number a phase ends with, saving them, and acting with one."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from train.adapters import CONFIG_FILE, adapter_hash
from train.config import Config, ConfigError
from train.learner import Learner
from train.policy import BASE, Policy

ADAPTERS = "adapters"


def version(number: int) -> str:
    """The name of a version, and of its folder in ``adapters``."""
    return f"policy-v{number:04d}"


def copy_start(start: Path, folder: Path) -> str:
    """Make the adapter to go on from version 0 of the run in ``folder``; returns its path there.

    Raises:
        ConfigError: ``start`` holds no adapter.
    """
    target = folder / ADAPTERS / version(0)
    if not (start / CONFIG_FILE).is_file():
        raise ConfigError(f"lora.start: {start} holds no {CONFIG_FILE}; give a folder that `saga train` wrote")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(start, target)
    return f"{ADAPTERS}/{version(0)}"


class Versions:
    """Saves versions of what the learner trains, and lets the policy act with them.

    Args:
        newest: the newest one that the journal names, within the run's folder; None: there is none.
    """

    def __init__(self, config: Config, folder: Path, learner: Learner, policy: Policy, newest: str | None) -> None:
        self._config = config
        self._folder = folder
        self._learner = learner
        self._policy = policy
        self.newest = newest

    @property
    def warm(self) -> int:
        """The version that a warm start ends with, or that stands in its place: 0 is the adapter of ``lora.start``."""
        return int(self._config.lora.start is not None and self._config.warm_start is not None)

    def after(self, iteration: int) -> int:
        """The version that an iteration of GRPO ends with; iteration 0: the one that it starts from."""
        return iteration + self.warm + (1 if self._config.rejection else 0)

    async def first(self) -> None:
        """Without a warm start the fresh adapter is version 0."""
        if self.newest is None:
            await self.add(0)

    async def add(self, number: int) -> None:
        """Save the adapter as version ``number`` and generate with it."""
        await self.save(number)
        await self.act_with(number)

    async def save(self, number: int) -> None:
        self.newest = f"{ADAPTERS}/{version(number)}"
        folder = self._folder / self.newest
        shutil.rmtree(folder, ignore_errors=True)  # left by a kill between saving and journalling
        await asyncio.to_thread(self._learner.lead, "save_adapter", folder)

    def drop_outdated(self, number: int) -> None:
        """Delete the version that is too old to be kept, once the journal names ``number``."""
        outdated = number - max(self._config.run.keep_adapters, self._config.staleness + 1)
        if outdated > 0:
            shutil.rmtree(self._folder / ADAPTERS / version(outdated), ignore_errors=True)

    async def act_with(self, number: int) -> None:
        if self._policy.adapter != version(number):
            await self._policy.activate(self._folder / ADAPTERS / version(number))

    @property
    def acting_hash(self) -> str:
        """Hash of the version that generates now; "": the base model does."""
        acting = self._policy.adapter
        return "" if acting == BASE else adapter_hash(self._folder / ADAPTERS / acting)
