import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_policy import tiny_base
from train.adapters import adapter_hash, adapter_rank, load_adapter, new_adapter, save_adapter
from train.config import ConfigError, LoraConfig

pytestmark = pytest.mark.unit

IDS = torch.tensor([[1, 2, 3, 4]])


def tiny(name: str = "owner/Tiny-Base", dtype: torch.dtype = torch.float32, **kwargs: int):
    model = tiny_base(**{"layers": 1} | kwargs).to(dtype)
    model.config._name_or_path = name
    return model


def perturbed(seed: int = 0, **kwargs):
    """An adapter that changes the outputs (a fresh one does not: its B is zero)."""
    # Suffixes, as PEFT makes them of "all-linear" in a base of ordinary size (in a tiny one it lists whole paths).
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = new_adapter(tiny(**kwargs), LoraConfig(rank=8, alpha=16, target_modules=modules), seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_adapter(perturbed(), tmp_path / "policy-v0001", "owner/Tiny-Base")
    return tmp_path / "policy-v0001"


def test_a_fresh_adapter_acts_as_the_base_in_fp32_and_leaves_the_random_state() -> None:
    base = tiny(dtype=torch.bfloat16)
    with torch.no_grad():
        expected = base(IDS).logits
        state = torch.get_rng_state()
        adapted = new_adapter(base, LoraConfig(rank=8), seed=1)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(adapted(IDS).logits, expected)
    trainable = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert len(trainable) == 2 * 7  # A and B of q, k, v, o, gate, up, down; the head is not adapted
    assert {parameter.dtype for parameter in trainable} == {torch.float32}
    assert not adapted.training


def test_only_the_last_layers_are_adapted_on_request() -> None:
    model = new_adapter(tiny(layers=3), LoraConfig(rank=8, last_layers=2), seed=0)
    adapted = {name.split(".layers.")[1][0] for name, p in model.named_parameters() if p.requires_grad}
    assert adapted == {"1", "2"}
    assert sum(p.requires_grad for p in model.parameters()) == 2 * 2 * 7
    with pytest.raises(ConfigError, match=r"lora\.last_layers: 4, but the model has 3 layers"):
        new_adapter(tiny(layers=3), LoraConfig(rank=8, last_layers=4), seed=0)


def test_the_seed_decides_the_weights() -> None:
    def weights(seed: int) -> torch.Tensor:
        model = new_adapter(tiny(), LoraConfig(rank=8), seed)
        return torch.cat([p.flatten() for n, p in model.named_parameters() if "lora_A" in n])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_save_and_load_give_the_same_outputs(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["policy-v0001"]
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "owner/Tiny-Base"
    loaded = load_adapter(tiny(), folder, trainable=True)
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, perturbed()(IDS).logits)
        assert not torch.equal(loaded(IDS).logits, tiny()(IDS).logits)
    assert list(loaded.peft_config) == ["default"]
    assert sum(parameter.requires_grad for parameter in loaded.parameters()) == 14
    frozen = load_adapter(tiny(), folder, trainable=False)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


def test_the_base_may_have_another_address(folder: Path) -> None:
    load_adapter(tiny(name="/models/tiny-base/"), folder, trainable=False)


def test_hash_follows_the_content(folder: Path, tmp_path: Path) -> None:
    save_adapter(load_adapter(tiny(name="/cache/tiny-base"), folder, trainable=True), tmp_path / "b", "owner/Tiny-Base")
    save_adapter(perturbed(seed=1), tmp_path / "c", "owner/Tiny-Base")
    save_adapter(perturbed(), tmp_path / "d", "owner/Other")
    assert adapter_hash(tmp_path / "b") == adapter_hash(folder)
    assert len({adapter_hash(tmp_path / name) for name in "bcd"}) == 3


def test_saving_again_replaces(folder: Path) -> None:
    before = adapter_hash(folder)
    save_adapter(perturbed(seed=5), folder, "owner/Tiny-Base")
    assert adapter_hash(folder) != before
    assert [path.name for path in folder.parent.iterdir()] == ["policy-v0001"]


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ({"name": "owner/Larger"}, "trained on base 'owner/Tiny-Base', but the model is 'owner/Larger'"),
        ({"width": 32}, r"gives 32 outputs, the adapter \[16\]"),
        ({"layers": 2}, "lacks 14 tensors"),
    ],
)
def test_an_adapter_of_another_base_is_refused(folder: Path, base: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_adapter(tiny(**base), folder, trainable=False)
    assert str(folder) in str(caught.value)


def test_an_adapter_with_more_layers_is_refused(tmp_path: Path) -> None:
    save_adapter(perturbed(layers=2), tmp_path / "a", "owner/Tiny-Base")
    with pytest.raises(ConfigError, match=r"it has no module 'model\.layers\.1"):
        load_adapter(tiny(), tmp_path / "a", trainable=False)


def test_damaged_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read adapter_config.json"):
        load_adapter(tiny(), tmp_path / "absent", trainable=False)
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    first = sorted(tensors)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, weights)
    with pytest.raises(ConfigError, match="lacks 1 tensors"):
        load_adapter(tiny(), folder, trainable=False)
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"cannot read adapter_model.safetensors"):
        load_adapter(tiny(), folder, trainable=False)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        adapter_hash(folder)


def test_a_second_adapter_and_foreign_modules_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="carries an adapter already"):
        load_adapter(perturbed(), folder, trainable=True)
    with pytest.raises(ValueError, match="carries an adapter already"):
        new_adapter(perturbed(), LoraConfig(rank=8), seed=0)
    with pytest.raises(ConfigError, match=r"lora.target_modules: \['nothing'\]"):
        new_adapter(tiny(), LoraConfig(rank=8, target_modules=["nothing"]), seed=0)


def test_the_rank_is_read_from_the_settings(folder: Path) -> None:
    assert adapter_rank(folder) == 8
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "r": None}))
    with pytest.raises(ConfigError, match=r"adapter_config\.json has the rank r None; give a folder written by"):
        adapter_rank(folder)
