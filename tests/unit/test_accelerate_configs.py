"""Every file of configs/accelerate is read and turned into a launch by accelerate itself."""

from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).parents[2] / "configs/accelerate"
EXPECTED: dict[str, dict[str, str]] = {
    "gpus.yaml": {"ACCELERATE_MIXED_PRECISION": "no"},
    "nodes.yaml": {"ACCELERATE_MIXED_PRECISION": "no"},
    "fsdp2.yaml": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen2DecoderLayer",
    },
    "zero2.yaml": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "zero3.yaml": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
}


def test_all_files_are_known() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_accelerate_launches_from_it(name: str) -> None:
    path = FOLDER / name
    assert f"accelerate launch --config_file configs/accelerate/{name}" in "".join(path.read_text().split("#")[:4])
    config: Any = load_config_from_file(str(path))  # raises for unknown keys
    arguments = ["--config_file", str(path), "-m", "train.cli", "train", "configs/alfworld-qwen7b.yaml"]
    args: Any = launch_command_parser().parse_args(arguments)
    args, _, _ = _validate_launch_command(args)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(config.deepspeed_config)  # as `accelerate launch` does
        _, environment = prepare_deepspeed_cmd_env(args)
    else:
        environment = prepare_multi_gpu_env(args)
    assert {key: environment.get(key) for key in EXPECTED[name]} == EXPECTED[name]
    assert args.num_processes >= 2
