"""LoRA adapters: create, save, load and identify. An adapter folder is a plain PEFT one.

Files: ``adapter_config.json`` and ``adapter_model.safetensors`` (fp32 weights). Loading checks the files against the
base before the model is touched, and never reads a pickle.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import peft
import torch
from peft import PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from train.config import ConfigError, LoraConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def new_adapter(model: PreTrainedModel, config: LoraConfig, seed: int) -> PeftModel:
    """Wrap ``model`` with a fresh trainable LoRA adapter (fp32 weights whatever the base's dtype; B = 0, so it acts as
    the base). The weights depend on ``seed`` alone; the global random state is left as it was.

    Raises:
        ConfigError: target modules that the base does not have.
        ValueError: ``model`` carries an adapter already.
    """
    _refuse_second_adapter(model)
    lora = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # a float works; PEFT's annotation says int
        lora_dropout=config.dropout,
        target_modules=_linear_modules(model) if config.target_modules == "all-linear" else config.target_modules,
        layers_to_transform=_last_layers(model, config.last_layers) if config.last_layers else None,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model, lora)
        except ValueError as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"lora.target_modules: {config.target_modules!r} does not fit the model ({reason}); use 'all-linear'"
            ) from None
    assert isinstance(adapted, PeftModel)
    return adapted.eval()


def load_adapter(model: PreTrainedModel, folder: Path, trainable: bool) -> PeftModel:
    """Wrap ``model`` with the adapter saved in ``folder``; ``trainable`` to go on training it.

    Raises:
        ConfigError: missing or damaged files, an adapter for another base (by name or by shapes), not LoRA.
        ValueError: ``model`` carries an adapter already.
    """
    _refuse_second_adapter(model)
    settings = _read_config(folder)
    if settings.get("peft_type") != "LORA":
        raise ConfigError(
            f"adapter {folder}: peft_type {settings.get('peft_type')!r}; only LORA adapters are supported"
        )
    _check_base(model, folder, settings)
    _check_shapes(model, folder, settings)
    adapted = PeftModel.from_pretrained(model, str(folder), is_trainable=trainable)
    # PEFT only warns of tensors that the file lacks, and would leave them at their random start.
    expected = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
    missing = sorted(expected - _shapes(folder).keys())
    if missing:
        raise ConfigError(
            f"adapter {folder}: lacks {len(missing)} tensors that {CONFIG_FILE} announces for base "
            f"{_base_of(model)!r} (first: {missing[0]}); the folder is damaged or belongs to another base"
        )
    return adapted.eval()


def save_adapter(model: PeftModel, folder: Path, base_name: str, state: dict[str, torch.Tensor] | None = None) -> None:
    """Write the adapter as a plain PEFT folder that appears whole or not at all; an older one of that name is replaced.

    ``base_name`` is the public name of the base (``Qwen/Qwen2.5-7B-Instruct``) and becomes
    ``base_model_name_or_path``, where PEFT alone would record a path of this machine. ``state``: the trained parameters
    by name, where the model holds only shards of them (see :func:`train.sharded.trained_state`).
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    # Without this PEFT asks the model hub whether the vocabulary was resized; only linear layers are adapted here.
    model.save_pretrained(str(partial), save_embedding_layers=False, state_dict=state)
    (partial / "README.md").unlink()  # PEFT's empty model card; an export writes a real one
    settings = json.loads((partial / CONFIG_FILE).read_text())
    settings["base_model_name_or_path"] = base_name
    if isinstance(settings["target_modules"], list):
        settings["target_modules"].sort()  # PEFT keeps a set, whose order differs from run to run
    (partial / CONFIG_FILE).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def adapter_hash(folder: Path) -> str:
    """SHA-256 (64 hex digits) over the adapter's settings and weights.

    Raises:
        ConfigError: the folder holds no adapter.
    """
    digest = hashlib.sha256(json.dumps(_read_config(folder), sort_keys=True).encode())
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        raise ConfigError(f"adapter {folder}: has no {WEIGHTS_FILE}; {_REMEDY}")
    with weights.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def adapter_rank(folder: Path) -> int:
    """The rank r of the LoRA adapter in ``folder``. Raises ConfigError: the folder holds no LoRA adapter."""
    rank = _read_config(folder).get("r")
    if not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"adapter {folder}: {CONFIG_FILE} has the rank r {rank!r}; {_REMEDY}")
    return rank


_REMEDY = "give a folder written by `saga train` or by PEFT's save_pretrained"


def _linear_modules(model: PreTrainedModel) -> list[str]:
    """Names of all linear modules but the head, as PEFT's "all-linear", which does not go with chosen layers."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head)
    return sorted({name.rpartition(".")[2] for name in linear})


def _last_layers(model: PreTrainedModel, count: int) -> list[int]:
    layers = model.config.num_hidden_layers
    if count > layers:
        raise ConfigError(f"lora.last_layers: {count}, but the model has {layers} layers; give at most {layers}")
    return list(range(layers - count, layers))


def _refuse_second_adapter(model: Any) -> None:
    # PEFT would stack the second adapter on the first without a word.
    if isinstance(model, PeftModel) or getattr(model, "peft_config", None):
        raise ValueError("the model carries an adapter already; pass the bare base model")


def _base_of(model: PreTrainedModel) -> str:
    return str(model.config._name_or_path)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        settings = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"adapter {folder}: cannot read {CONFIG_FILE} ({error.strerror}); {_REMEDY}") from None
    except ValueError as error:
        raise ConfigError(f"adapter {folder}: {CONFIG_FILE} is not JSON ({error}); {_REMEDY}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"adapter {folder}: {CONFIG_FILE} is not a JSON object; {_REMEDY}")
    return settings


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Tensor shapes from the header of the weights file."""
    path = folder / WEIGHTS_FILE
    try:
        with safe_open(path, framework="pt") as file:
            return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"adapter {folder}: cannot read {WEIGHTS_FILE} ({reason}); {_REMEDY}") from None


def _check_base(model: PreTrainedModel, folder: Path, settings: dict[str, Any]) -> None:
    """Compare the names of the bases without owner, path and case: the same model has several addresses."""
    wanted, given = str(settings.get("base_model_name_or_path") or ""), _base_of(model)
    if wanted and given and _short(wanted) != _short(given):
        raise ConfigError(
            f"adapter {folder}: was trained on base {wanted!r}, but the model is {given!r}; set model.name to that "
            "base or choose another adapter (if both are the same model, correct base_model_name_or_path in "
            f"{CONFIG_FILE})"
        )


def _short(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].lower()


def _check_shapes(model: PreTrainedModel, folder: Path, settings: dict[str, Any]) -> None:
    misfit = (
        f"adapter {folder}: does not fit base {_base_of(model)!r}: {{}}; set model.name to its base "
        f"{settings.get('base_model_name_or_path')!r} or choose another adapter"
    )
    for name, shape in _shapes(folder).items():
        path, _, part = name.removesuffix(".weight").removeprefix(_PREFIX).rpartition(".")
        try:
            weight = model.get_submodule(path).weight
        except AttributeError:
            raise ConfigError(misfit.format(f"it has no module {path!r}")) from None
        assert isinstance(weight, torch.Tensor)
        outputs, inputs = weight.shape
        if part == "lora_A" and shape[1:] != [inputs]:
            raise ConfigError(misfit.format(f"{path} takes {inputs} inputs, the adapter {shape[1:]}"))
        if part == "lora_B" and shape[:1] != [outputs]:
            raise ConfigError(misfit.format(f"{path} gives {outputs} outputs, the adapter {shape[:1]}"))
