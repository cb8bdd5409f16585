import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from huggingface_hub import HfApi
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.tiny import tiny_tokenizer
from train.adapters import new_adapter, save_adapter
from train.config import ConfigError, LoraConfig, load_config, save_config
from train.export import dataset_row, evaluation_table, export_adapter, export_dataset, export_merged, push_folder
from train.files import write_json
from train.trajectory import Context, Episode, Span, Step, TrajectoryError, append_episode

pytestmark = pytest.mark.unit

EVALUATION = {
    "phase": "eval-final",
    "adapter": "policy-v0001",
    "task_set": "household/easy/eval-48",
    "seeds": [0],
    "metrics": {
        "items": 48,
        "success": 0.75,
        "success_interval": [0.6122, 0.8508],
        "score": 0.75,
        "steps": 6.25,
        "invalid_rate": 0.125,
    },
}


def tiny_base(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[256, 10, 20, 30, 257]])).logits


def make_run(folder: Path, base: Path | str, **result: Any) -> Path:
    """A finished run's folder without adapter weights."""
    source = folder / "source.yaml"
    folder.mkdir(parents=True)
    source.write_text(
        yaml.safe_dump(
            {
                "run": {"name": "tiny"},
                "model": {"name": str(base), "dtype": "float32"},
                "eval": {"tasks": "household/easy/eval-48"},
            }
        )
    )
    save_config(load_config(source), folder / "config.yaml")
    write_json(folder / "evals" / "eval-final.json", EVALUATION)
    write_json(
        folder / "result.json", {"adapter": "adapters/policy-v0001", "evals": ["evals/eval-final.json"], **result}
    )
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, torch.Tensor]:
    """(run folder, base model folder, logits of the base with the run's adapter)."""
    root = tmp_path_factory.mktemp("export")
    base = tiny_base(root / "tiny-base")
    run = make_run(root / "run", base)
    model = new_adapter(AutoModelForCausalLM.from_pretrained(base), LoraConfig(rank=8, alpha=16), seed=0)
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    save_adapter(model, run / "adapters" / "policy-v0001", str(base))
    return run, base, logits(model)


def front_matter(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def test_an_exported_adapter_loads_in_plain_peft_and_acts_the_same(
    trained: tuple[Path, Path, torch.Tensor], tmp_path: Path
) -> None:
    run, base, expected = trained
    out = tmp_path / "out" / "my-adapter"
    lines = export_adapter(run, out)
    assert {file.name for file in out.iterdir()} == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(out))
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)
    assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(base)), expected, atol=1e-2)
    assert lines[-1] == f"vllm serve {base} --enable-lora --max-lora-rank 8 --lora-modules my-adapter={out}"


def test_the_model_card_tells_base_configuration_and_evaluations(
    trained: tuple[Path, Path, torch.Tensor], tmp_path: Path
) -> None:
    run, base, _ = trained
    export_adapter(run, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert front_matter(card) == {
        "base_model": str(base),
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["lora", "saga", "text-world", "household"],
    }
    assert "| eval-final | policy-v0001 | household/easy/eval-48 | 48 | 1 | 75.0% | 61.2% – 85.1% |" in card
    assert "max_new_tokens: 32" in card


def test_the_bundled_model_gets_its_public_name(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "smollm2-135m-instruct")
    adapter = run / "adapters" / "policy-v0001"
    adapter.mkdir(parents=True)
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    (adapter / "adapter_config.json").write_text(
        json.dumps({"r": 32, "base_model_name_or_path": "a/cache/models/smollm2-135m-instruct"})
    )
    lines = export_adapter(run, tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert settings == {"r": 32, "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct"}
    assert lines[-1].startswith("vllm serve HuggingFaceTB/SmolLM2-135M-Instruct --enable-lora --max-lora-rank 32 ")


def test_a_merged_model_acts_as_base_and_adapter_did(trained: tuple[Path, Path, torch.Tensor], tmp_path: Path) -> None:
    run, _, expected = trained
    out = tmp_path / "merged"
    lines = export_merged(run, out)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(out)), expected, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(out).chat_template == tiny_tokenizer().chat_template
    assert front_matter((out / "README.md").read_text())["base_model_relation"] == "finetune"
    assert lines[-1] == f"vllm serve {out}"


def test_a_merged_model_is_cast_after_the_merge(trained: tuple[Path, Path, torch.Tensor], tmp_path: Path) -> None:
    run, base, _ = trained
    half = make_run(tmp_path / "run", base)
    text = (half / "config.yaml").read_text()
    (half / "config.yaml").write_text(text.replace("float32", "bfloat16"))
    (half / "adapters").symlink_to(run / "adapters")
    export_merged(run, tmp_path / "fp32")
    export_merged(half, tmp_path / "bf16")
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32").state_dict()
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype="auto").state_dict()
    assert all(torch.equal(rounded[name], weight.bfloat16()) for name, weight in exact.items())


def episode(number: int, *, won: bool) -> Episode:
    steps = [
        Step(
            index=0, observation="You see a desk.", text="Action: open desk", action="open desk", result="It is open."
        ),
        Step(index=1, observation="It opens.", text="hm", action=None, valid=False, result="No action."),
    ]
    context = Context(ids=[1, 2, 3], spans=[Span(start=1, end=3, step=0, logprobs=[-0.5, -0.25])])
    return Episode(
        id=f"grpo-0001/{number}",
        phase="grpo-0001",
        env="household",
        task=f"easy/{number}",
        task_type="pick_and_place_simple",
        seed=number,
        goal="put a mug on the desk.",
        won=won,
        score=float(won),
        steps=steps,
        contexts=[context],
        tokens_in=7,
        tokens_out=2,
    )


def test_a_dataset_row_is_the_dialogue_and_the_scalars() -> None:
    row = dataset_row(episode(3, won=True))
    assert row["messages"] == [
        {"role": "user", "content": "You see a desk."},
        {"role": "assistant", "content": "Action: open desk"},
        {"role": "user", "content": "It opens."},
        {"role": "assistant", "content": "hm"},
    ]
    assert row["last_result"] == "No action."
    assert row["actions"] == ["open desk", None]
    assert row["valid"] == [True, False]
    assert (row["steps"], row["invalid_actions"], row["won"], row["seed"]) == (2, 1, True, 3)
    assert "contexts" not in row


def test_an_exported_dataset_is_read_by_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", "smollm2-135m-instruct")
    for number in range(300):
        append_episode(run / "episodes" / "grpo-0001.jsonl.gz", episode(number, won=number < 100))
    append_episode(
        run / "episodes" / "demos.jsonl.gz",
        Episode(id="demos/0", phase="demos", env="household", task="easy/1", task_type="x", seed=0, status="env_error"),
    )
    out = tmp_path / "rollouts"
    lines = export_dataset(run, out)
    assert lines == [f"301 episodes in 2 splits written to {out}; load_dataset({str(out)!r}) reads them"]
    loaded = datasets.load_dataset(str(out), cache_dir=str(tmp_path / "cache"))
    assert {name: len(split) for name, split in loaded.items()} == {"demos": 1, "grpo_0001": 300}
    assert loaded["grpo_0001"]["won"][:] == [True] * 100 + [False] * 200
    assert loaded["grpo_0001"][7] == dataset_row(episode(7, won=True))
    assert loaded["demos"][0]["messages"] == []
    card = (out / "README.md").read_text()
    assert "| grpo_0001 | 300 | 100 |" in card
    assert "| messages | list of {role: string, content: string} |" in card
    assert "| score | float64 |" in card


def test_a_damaged_episode_file_leaves_no_export(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "smollm2-135m-instruct")
    file = run / "episodes" / "demos.jsonl.gz"
    append_episode(file, episode(1, won=True))
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(TrajectoryError, match="truncated in episode 1"):
        export_dataset(run, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_what_cannot_be_exported_is_named(trained: tuple[Path, Path, torch.Tensor], tmp_path: Path) -> None:
    run, _, _ = trained
    taken = tmp_path / "taken"
    taken.mkdir()
    for export in (export_adapter, export_merged):
        with pytest.raises(ConfigError, match="taken exists and is not overwritten"):
            export(run, taken)
    with pytest.raises(ConfigError, match="nowhere: is no run folder"):
        export_adapter(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"no episodes/\*\.jsonl\.gz"):
        export_dataset(run, tmp_path / "out")
    untrained = make_run(tmp_path / "untrained", "smollm2-135m-instruct", adapter=None)
    with pytest.raises(ConfigError, match="trained no adapter"):
        export_adapter(untrained, tmp_path / "out")
    gone = make_run(tmp_path / "gone", "smollm2-135m-instruct")
    with pytest.raises(ConfigError, match="adapter but it is gone"):
        export_adapter(gone, tmp_path / "out")
    (gone / "result.json").unlink()
    with pytest.raises(ConfigError, match="the run has not finished"):
        export_adapter(gone, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_evaluation_table_of_no_evaluation_has_only_its_head() -> None:
    assert evaluation_table([]).count("\n") == 2


def test_push_makes_the_repository_and_uploads_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def create(self: HfApi, repo: str, **options: Any) -> str:
        calls.append((repo, options))
        return f"https://hub/{repo}"

    monkeypatch.setattr(HfApi, "create_repo", create)
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **options: calls.append(("upload", options)))
    assert push_folder(tmp_path, "me/rollouts", is_dataset=True) == "https://hub/me/rollouts"
    assert calls[0] == ("me/rollouts", {"repo_type": "dataset", "exist_ok": True})
    assert calls[1][1]["folder_path"] == tmp_path
    assert calls[1][1]["repo_type"] == "dataset"


def test_a_refused_push_keeps_the_export_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(self: HfApi, repo: str, **options: Any) -> str:
        raise OSError("no connection")

    monkeypatch.setattr(HfApi, "create_repo", create)
    with pytest.raises(ConfigError, match=r"--push me/x: no connection.*The export stays in"):
        push_folder(tmp_path, "me/x", is_dataset=False)
