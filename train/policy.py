"""The policy: one set of weights with its LoRA adapter, and the engine that generates with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from train.adapters import load_adapter, new_adapter, save_adapter
from train.agent import Job, PolicyPlayer
from train.chat import ChatModel
from train.config import AgentConfig, Config
from train.load import load_policy, load_tokenizer, public_name
from train.tokens import TokenCodec

BASE = "base"


class Policy:
    """Model, tokenizer, codec and engine; ``adapter`` names the version that generates now.

    With ``engine: hf`` the trained weights themselves generate. With ``engine: server`` every new version is saved and
    pushed to the servers, which must see the run folder under the same path.
    """

    def __init__(self, config: Config, *, adapter: Path | None = None, trainable: bool) -> None:
        import torch

        torch.set_num_threads(config.run.threads or torch.get_num_threads())
        self.config = config
        self.adapter = BASE
        self.model: Any = None
        self.chat: ChatModel
        local = trainable or config.model.engine == "hf"
        if local:
            self.model, self.tokenizer = load_policy(config.model)
            if adapter is not None:
                self.model = load_adapter(self.model, adapter, trainable=trainable)
                self.adapter = adapter.name
        else:
            self.tokenizer = load_tokenizer(config.model)
        self.codec = TokenCodec(self.tokenizer)
        self._pending = adapter
        self._open_engine()

    def _open_engine(self) -> None:
        model = self.config.model
        if model.engine == "hf":
            from train.hf_model import HFChatModel

            self.chat = HFChatModel(
                self.model,
                self.codec,
                name=public_name(model.name),
                max_batch=model.max_batch,
                max_context=self.config.agent.context_tokens,
            )
            self.chat.weights_changed(self.adapter)
        else:
            from train.server_model import ServerModel

            self.chat = ServerModel(model.urls, model.name, self.codec)

    async def ready(self) -> None:
        """Check the servers, and give them the adapter that the policy was opened with."""
        if self.config.model.engine == "server":
            await self.chat.check()  # type: ignore[attr-defined]
        if self._pending is not None:
            await self.activate(self._pending)
            self._pending = None

    async def start_adapter(self) -> None:
        """Put a fresh adapter on the base model (LoRA's B is zero: it acts like the base until trained)."""
        self.model = new_adapter(self.model, self.config.lora, self.config.run.seed)
        await self._reopen()

    async def _reopen(self) -> None:
        if self.config.model.engine == "hf":
            await self.chat.close()
            self._open_engine()

    def save(self, folder: Path) -> None:
        save_adapter(self.model, folder, public_name(self.config.model.name))

    async def activate(self, folder: Path) -> None:
        """Generate with the adapter saved in ``folder`` from now on; its name is the version."""
        self.adapter = folder.name
        if self.config.model.engine == "hf":
            self.chat.weights_changed(self.adapter)  # type: ignore[attr-defined]
        else:
            await self.chat.load_adapter(folder, self.adapter)  # type: ignore[attr-defined]

    def player(self, job: Job, temperature: float) -> PolicyPlayer:
        agent: AgentConfig = self.config.agent
        return PolicyPlayer(self.chat, self.codec, job, agent, temperature, self.config.run.seed)

    @property
    def dtype(self) -> str:
        """Of the weights that generate; empty where a server holds them."""
        return "" if self.config.model.engine == "server" else str(self.model.dtype).removeprefix("torch.")

    async def close(self) -> None:
        await self.chat.close()
