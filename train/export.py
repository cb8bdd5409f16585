"""What a finished run hands on: its adapter, its merged weights, its rollouts as a dataset, each with a card.

Nothing is overwritten, and an export folder appears whole or not at all.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from train.config import Config, ConfigError, ModelConfig, load_config
from train.trajectory import Episode, read_episodes

if TYPE_CHECKING:
    from datasets import Features

_EPISODES_PER_ROW_GROUP = 256


def export_adapter(run_dir: Path, out: Path) -> list[str]:
    """Write the run's final adapter to ``out`` as a PEFT folder (``PeftModel.from_pretrained`` loads it) with a card.

    Its base model is named by the public name, not by a path of this machine.

    Returns:
        Lines for the user: where it is, and the command that serves it with vLLM.

    Raises:
        ConfigError: ``run_dir`` is no finished run or trained no adapter; ``out`` exists.
    """
    from train.adapters import CONFIG_FILE, WEIGHTS_FILE
    from train.load import public_name

    run = _Run(run_dir)
    base = public_name(run.config.model.name)
    with _new_folder(out) as folder:
        shutil.copyfile(run.adapter / WEIGHTS_FILE, folder / WEIGHTS_FILE)
        settings = json.loads((run.adapter / CONFIG_FILE).read_text())
        settings["base_model_name_or_path"] = base
        (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
        use = (
            "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
            f'base = AutoModelForCausalLM.from_pretrained("{base}")\n'
            f'model = PeftModel.from_pretrained(base, "{out.name}")\n'
        )
        front = {"base_model": base, "library_name": "peft", "pipeline_tag": "text-generation", "tags": run.tags}
        (folder / "README.md").write_text(_model_card(run, front, "LoRA adapter", base, use))
    serve = f"vllm serve {base} --enable-lora --max-lora-rank {settings['r']} --lora-modules {out.name}={out}"
    return [f"adapter written to {out}; serve it with", serve]


def export_merged(run_dir: Path, out: Path) -> list[str]:
    """Write the full model with the run's final adapter merged in, its tokenizer and a card to ``out``.

    The merge is done in float32 and cast to bfloat16 afterwards (unless ``model.dtype`` is float32): merging in
    bfloat16 rounds twice.

    Raises:
        ConfigError: as :func:`export_adapter`; the base model is absent or the adapter does not fit it.
    """
    import torch

    from train.adapters import load_adapter
    from train.load import load_policy, public_name

    run = _Run(run_dir)
    settings = run.config.model
    base = public_name(settings.name)
    with _new_folder(out) as folder:
        model, tokenizer = load_policy(ModelConfig(name=settings.name, dtype="float32"))
        merged: Any = load_adapter(model, run.adapter, trainable=False).merge_and_unload()
        merged.to(torch.float32 if settings.dtype == "float32" else torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        use = (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{out.name}")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{out.name}")\n'
        )
        front = {
            "base_model": base,
            "base_model_relation": "finetune",
            "library_name": "transformers",
            "pipeline_tag": "text-generation",
            "tags": run.tags,
        }
        (folder / "README.md").write_text(_model_card(run, front, "Model with a merged LoRA adapter", base, use))
    return [f"merged model written to {out}; serve it with", f"vllm serve {out}"]


def export_dataset(run_dir: Path, out: Path) -> list[str]:
    """Write the run's episodes to ``out`` as a dataset that ``datasets.load_dataset`` reads: one split per phase.

    Raises:
        ConfigError: ``run_dir`` is no run or has no episodes; ``out`` exists.
        TrajectoryError: an episode file is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    config = _config_of(run_dir)
    files = sorted((run_dir / "episodes").glob("*.jsonl.gz"))
    if not files:
        raise ConfigError(f"{run_dir}: has no episodes/*.jsonl.gz; export a run that has played")
    features = _features()
    counts: dict[str, tuple[int, int]] = {}
    with _new_folder(out) as folder:
        (folder / "data").mkdir()
        for file in files:
            split = re.sub(r"\W", "_", file.name.removesuffix(".jsonl.gz"))
            episodes = won = 0
            with pq.ParquetWriter(folder / "data" / f"{split}.parquet", features.arrow_schema) as writer:
                for batch in _batches(read_episodes(file)):
                    rows = [features.encode_example(dataset_row(episode)) for episode in batch]
                    writer.write_table(pa.Table.from_pylist(rows, schema=features.arrow_schema))
                    episodes += len(batch)
                    won += sum(episode.won for episode in batch)
            counts[split] = (episodes, won)
        (folder / "README.md").write_text(_dataset_card(config, features, counts))
    total = sum(episodes for episodes, _ in counts.values())
    return [f"{total} episodes in {len(counts)} splits written to {out}; load_dataset({str(out)!r}) reads them"]


def push_folder(folder: Path, repo: str, *, is_dataset: bool) -> str:
    """Upload an export to the hub repository ``repo`` (made if it does not exist) and return its address.

    Raises:
        ConfigError: the hub refused or could not be reached; the export stays where it is.
    """
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    kind = "dataset" if is_dataset else "model"
    try:
        api = HfApi()
        address = api.create_repo(repo, repo_type=kind, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, repo_type=kind, commit_message="Export of a training run")
    except (HfHubHTTPError, HFValidationError, HTTPError, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(
            f"--push {repo}: {reason}; check the name and `hf auth whoami`. The export stays in {folder}"
        ) from error
    return str(address)


def dataset_row(episode: Episode) -> dict[str, Any]:
    """One dataset row: the dialogue as ``messages`` (user: world, assistant: agent), and the episode's scalars.

    ``messages`` ends with the agent's last turn; ``last_result`` is what the world answered to it. ``actions`` and
    ``valid`` have one item per agent turn (an action is None where the turn held none).
    """
    messages = []
    for step in episode.steps:
        messages.append({"role": "user", "content": step.observation})
        messages.append({"role": "assistant", "content": step.text})
    scalars = episode.model_dump(exclude={"steps", "contexts", "memory", "schema_version"})
    return {
        **scalars,
        "steps": len(episode.steps),
        "invalid_actions": episode.invalid_actions,
        "messages": messages,
        "actions": [step.action for step in episode.steps],
        "valid": [step.valid for step in episode.steps],
        "last_result": episode.steps[-1].result if episode.steps else "",
    }


def _features() -> Features:
    from datasets import Features, List, Value

    text, whole, real, truth = Value("string"), Value("int64"), Value("float64"), Value("bool")
    return Features(
        {
            **dict.fromkeys(("id", "phase", "env", "task", "task_type"), text),
            "seed": whole,
            **dict.fromkeys(("group", "goal", "agent", "model", "adapter", "status", "error"), text),
            "won": truth,
            "truncated": truth,
            "score": real,
            "episode_return": real,
            "steps": whole,
            "invalid_actions": whole,
            "expert_steps": whole,
            "tokens_in": whole,
            "tokens_out": whole,
            "seconds": real,
            "env_seconds": real,
            "messages": List({"role": text, "content": text}),
            "actions": List(text),
            "valid": List(truth),
            "last_result": text,
        }
    )


class _Run:
    """A finished run with an adapter.

    Raises:
        ConfigError: no such run, not finished, no adapter.
    """

    def __init__(self, folder: Path) -> None:
        self.config = _config_of(folder)
        file = folder / "result.json"
        if not file.is_file():
            raise ConfigError(f"{folder}: the run has not finished (no result.json); go on with saga train --resume")
        result = json.loads(file.read_text())
        if not result["adapter"]:
            raise ConfigError(f"{folder}: the run trained no adapter; set warm_start or grpo in its configuration")
        self.adapter = folder / result["adapter"]
        if not (self.adapter / "adapter_config.json").is_file():
            raise ConfigError(f"{self.adapter}: result.json names this adapter but it is gone; restore the run folder")
        self.evals: list[dict[str, Any]] = [json.loads((folder / path).read_text()) for path in result["evals"]]
        self.tags = ["lora", "saga", "text-world", self.config.env.name]


def _config_of(run_dir: Path) -> Config:
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{run_dir}: is no run folder (no config.yaml); give one that saga train made")
    return load_config(file)


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``out`` when the block succeeds and vanishes when it fails."""
    if out.exists():
        raise ConfigError(f"export: {out} exists and is not overwritten; choose another folder or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=out.parent) as scratch:
        folder = Path(scratch) / "export"
        folder.mkdir()
        yield folder
        folder.rename(out)


def _batches(episodes: Iterator[Episode]) -> Iterator[list[Episode]]:
    batch: list[Episode] = []
    for episode in episodes:
        batch.append(episode)
        if len(batch) == _EPISODES_PER_ROW_GROUP:
            yield batch
            batch = []
    if batch:
        yield batch


def _front_matter(fields: dict[str, Any]) -> str:
    return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)}---\n"


def _model_card(run: _Run, front: dict[str, Any], what: str, base: str, use: str) -> str:
    config = run.config
    settings = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return (
        f"{_front_matter(front)}\n# {config.run.name}\n\n"
        f"{what} of {base}, trained to act in the text world {config.env.name}.\n\n"
        f"## Evaluation\n\n{evaluation_table(run.evals)}\n"
        f"## Use\n\n```python\n{use}```\n\n"
        f"## Configuration\n\n```yaml\n{settings}```\n"
    )


def evaluation_table(evals: list[dict[str, Any]]) -> str:
    """A Markdown table of evaluation results (what :func:`train.evaluate.evaluate` returns), one row each."""
    lines = [
        "| evaluation | adapter | task set | items | seeds | success | 95 % interval | mean score | steps | invalid |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in evals:
        metrics = result["metrics"]
        low, high = metrics["success_interval"]
        lines.append(
            f"| {result['phase']} | {result['adapter']} | {result['task_set']} | {metrics['items']} "
            f"| {len(result['seeds'])} | {metrics['success']:.1%} | {low:.1%} – {high:.1%} "
            f"| {metrics['score']:.3f} | {metrics['steps']:.1f} | {metrics['invalid_rate']:.1%} |"
        )
    return "\n".join(lines) + "\n"


def _dataset_card(config: Config, features: Features, counts: dict[str, tuple[int, int]]) -> str:
    front = {
        "pretty_name": f"Rollouts of {config.run.name}",
        "task_categories": ["text-generation"],
        "tags": ["saga", "agents", "text-world", config.env.name],
        "configs": [
            {
                "config_name": "default",
                "data_files": [{"split": split, "path": f"data/{split}.parquet"} for split in counts],
            }
        ],
    }
    splits = "\n".join(f"| {split} | {episodes} | {won} |" for split, (episodes, won) in counts.items())
    schema = "\n".join(f"| {name} | {_type_name(feature)} |" for name, feature in features.items())
    return (
        f"{_front_matter(front)}\n# Rollouts of {config.run.name}\n\n"
        f"Episodes of {config.model.name} in the text world {config.env.name}, one row an episode, one split a phase "
        "of the run.\n`messages` is the dialogue (user: the world, assistant: the agent); `last_result` is the "
        "world's answer to the last turn.\n\n"
        f"## Splits\n\n| split | episodes | won |\n|---|---|---|\n{splits}\n\n"
        f"## Columns\n\n| column | type |\n|---|---|\n{schema}\n"
    )


def _type_name(feature: Any) -> str:
    inner = getattr(feature, "feature", None)
    if inner is None:
        return str(feature.dtype)
    if isinstance(inner, dict):
        return f"list of {{{', '.join(f'{name}: {value.dtype}' for name, value in inner.items())}}}"
    return f"list of {inner.dtype}"
