"""The policy: one set of weights with its LoRA adapter, and the engine that generates with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.adapters import adapter_rank, load_adapter, new_adapter
from train.agent import Job, PolicyPlayer
from train.api_model import ApiModel, MessageCodec
from train.chat import ChatModel
from train.config import AgentConfig, Config, ConfigError
from train.load import chosen_dtype, load_policy, load_tokenizer, model_folder, public_name
from train.memory import open_memory
from train.recaller import Recaller
from train.samem import open_states
from train.tokens import Codec, TokenCodec
from train.vllm_server import VLLMServer, smallest_rank

if TYPE_CHECKING:
    from memory.guide import Memory
    from memory.recall import StateMemory

BASE = "base"


class Policy:
    """Model, tokenizer, codec and engine; ``adapter`` names the version that generates now.

    With ``engine: hf`` the trained weights themselves generate. With ``engine: server`` every new version is saved and
    pushed to the servers, which must see the run folder under the same path; with ``engine: vllm`` the only server is
    started by :meth:`ready`, started again when it dies, and ended by :meth:`close`.

    Args:
        config: of the run.
        adapter: folder of the adapter to begin with; None: the base model.
        trainable: whether the weights are loaded here for training.
        folder: of the run or evaluation; takes the output of its own server, ``vllm.log``, and holds the memory.

    Raises:
        ConfigError: the model cannot be loaded, the adapter does not fit, or vLLM is not installed.
        MemoryRecordError: the memory cannot be opened.
    """

    def __init__(self, config: Config, *, adapter: Path | None, trainable: bool, folder: Path) -> None:
        import torch

        torch.set_num_threads(config.run.threads or torch.get_num_threads())
        self.config = config
        self._folder = folder
        if config.model.engine == "api" and adapter is not None:
            raise ConfigError(f"--adapter {adapter}: an API takes no adapter; serve the model with vLLM, or drop it")
        self.adapter = BASE
        self.model: Any = None
        self.tokenizer: Any = None
        self.chat: ChatModel
        self.memory = open_memory(config.memory, config.env.name, folder, deterministic=config.run.deterministic)
        """What its players are guided by; see :meth:`guide_by`."""
        self.states: StateMemory | None = open_states(config.samem, config.memory, folder)
        """What its players recall from; see :meth:`guide_by`."""
        self._server: VLLMServer | None = None
        if config.model.engine == "vllm":
            self._server = own_server(config, folder / "vllm.log", adapter, trainable=trainable)
        local = trainable or config.model.engine == "hf"
        if local:
            self.model, self.tokenizer = load_policy(config.model)
            if adapter is not None:
                self.model = load_adapter(self.model, adapter, trainable=trainable)
                self.adapter = adapter.name
        elif config.model.engine != "api":
            self.tokenizer = load_tokenizer(config.model)
        self.codec: Codec = MessageCodec() if self.tokenizer is None else TokenCodec(self.tokenizer)
        self._pending = adapter
        self._open_engine()

    def _open_engine(self) -> None:
        from train.server_model import ServerModel

        model = self.config.model
        if isinstance(self.codec, MessageCodec):
            self.chat = ApiModel(ServerModel(model.urls, model.name, None), self.codec)
            return
        assert isinstance(self.codec, TokenCodec)
        if model.engine == "hf":
            from train.hf_model import HFChatModel

            self.chat = HFChatModel(
                self.model,
                self.codec,
                name=public_name(model.name),
                max_batch=model.max_batch,
                max_context=self.config.agent.context_tokens,
                share_prefixes=not self.config.run.deterministic,
            )
            self.chat.weights_changed(self.adapter)
            return
        if self._server is not None:
            self.chat = ServerModel([self._server.url], self._server.name, self.codec, revive=self._server.revive)
        else:
            self.chat = ServerModel(model.urls, model.name, self.codec)

    async def ready(self) -> None:
        """Start the run's own server, check the servers, and give them the adapter that the policy was opened with.

        Raises:
            ConfigError: a server that does not fit. ModelFault: one that does not start or does not answer.
        """
        if self._server is not None:
            await self._server.start()
        if self.config.model.engine in ("vllm", "server"):
            adapters = self.config.staleness + 1 if self.config.grpo else 1
            await self.chat.check(self.config.agent.context_tokens, adapters)  # type: ignore[attr-defined]
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

    async def activate(self, folder: Path) -> None:
        """Generate with the adapter saved in ``folder`` from now on; its name is the version."""
        self.adapter = folder.name
        if self.config.model.engine == "hf":
            self.chat.weights_changed(self.adapter)  # type: ignore[attr-defined]
        else:
            await self.chat.load_adapter(folder, self.adapter)  # type: ignore[attr-defined]

    def player(
        self, job: Job, temperature: float, memory: Memory | None = None, *, training: bool = False
    ) -> PolicyPlayer:
        """Who plays ``job``, guided by ``memory`` (None: by the policy's own) if the job asks for it.

        ``training``: it explores.
        """
        agent: AgentConfig = self.config.agent
        seed = self.config.run.seed
        guide, recaller = None, None
        if job.guided:
            memory = memory or self.memory
            guide = None if memory is None else memory.guide(job.id, lambda text: len(self.codec.text(text)))
            recaller = None if self.states is None else Recaller(self.states, f"{seed}/{job.id}", training=training)
        return PolicyPlayer(self.chat, self.codec, job, agent, temperature, seed, guide, recaller)

    @property
    def guided(self) -> bool:
        """Whether memory or table has a part in what is played now."""
        return self.memory is not None or self.states is not None

    def guide_by(self, memory: Memory | None, states: StateMemory | None) -> None:
        """Let players be guided by ``memory`` and recall from ``states`` from now on; the one before is closed."""
        if self.memory is not None:
            self.memory.close()
        self.memory, self.states = memory, states

    def adopt(self, config: Config) -> None:
        """Play under ``config`` from now on, which has the same model, engine and world: prompts and memory change.

        Raises:
            MemoryRecordError: its memory or table cannot be opened.
        """
        self.guide_by(None, None)
        self.config = config
        self.memory = open_memory(config.memory, config.env.name, self._folder)
        self.states = open_states(config.samem, config.memory, self._folder)

    @property
    def dtype(self) -> str:
        """Of the weights that generate; empty where a server that was started elsewhere holds them."""
        if self.config.model.engine in ("server", "api"):
            return ""
        return _name(chosen_dtype(self.config.model.dtype) if self._server else self.model.dtype)

    async def close(self) -> None:
        try:
            await self.chat.close()
        finally:
            if self._server is not None:
                self._server.stop()
            if self.memory is not None:
                self.memory.close()


def own_server(config: Config, log: Path, adapter: Path | None, *, trainable: bool) -> VLLMServer:
    """The server of ``model.engine: vllm``, not started yet. Raises ConfigError: see :class:`Policy`."""
    vllm = config.vllm
    ranks: list[int] = [config.lora.rank] if trainable else []
    if adapter is not None:
        ranks.append(adapter_rank(adapter))
    return VLLMServer(
        model_folder(config.model.name),
        served_name=public_name(config.model.name),
        dtype=_name(chosen_dtype(config.model.dtype)),
        log=log,
        max_model_len=config.agent.context_tokens,
        # Two: a version that episodes still use, and the next. A server that will see no adapter is faster without.
        max_loras=2 if ranks else 0,
        max_lora_rank=smallest_rank(max(ranks, default=1)),
        gpu_memory=vllm.gpu_memory,
        cpu_cache_gib=vllm.cpu_cache_gib,
        threads=vllm.threads,
        extra=vllm.flags,
        env={"CUDA_VISIBLE_DEVICES": vllm.devices} if vllm.devices else {},
        start_s=vllm.start_s,
    )


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
