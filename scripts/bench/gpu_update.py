"""Memory and speed of a LoRA update of a 7B model on a GPU: Qwen2.5-7B's architecture, random weights, no download.

    scripts/bench/gpu_update.sh            # minutes; estimated to need 70 GB of GPU memory
    scripts/bench/gpu_update.sh --tiny     # the same code with two small layers, seconds, on a CPU too

It has been run with --tiny on a CPU only, never on a GPU.

What is timed is train.grpo.EpisodeGRPOTrainer.update as a training run calls it: bfloat16 weights, float32 LoRA of
rank 64 on all linear layers, no gradient checkpointing, ``--rows`` rows of 4,096 tokens (one episode each, every tenth
token trained: 26 replies of 16), ``--rows-per-micro-batch`` of them in a forward pass, one optimiser step. The first
update, in which kernels are chosen and memory is gathered, is left out; then ``--updates`` follow.

    peak memory   largest amount allocated (and reserved) on the GPU in the timed updates; of the process on a CPU
    tokens/s      tokens of the rows (all of them, prompts included) per second of the update
    MFU           model FLOP of the update / (seconds x peak FLOP/s of the device for dense bfloat16)

Model FLOP of an update, for T tokens in rows of n tokens, L layers of width d (heads x head size), P weights in the
frozen linear layers of the blocks, p LoRA weights, vocabulary V, and t trained tokens (the head runs on these alone):

    4 P T          frozen layers: 2 forward, 2 backward for the activations; there are no gradients of frozen weights
    6 p T          LoRA: 2 forward, 4 backward
    6 L d n T      causal attention: 2 n d a token and layer forward (half of the full square), twice that backward
    4 d V t        head, frozen too

Norms, softmaxes and embeddings are left out. A full fine-tuning has 6 P T, so its MFU is not comparable.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.trajectory import Episode

ROOT = Path(__file__).resolve().parents[2]

QWEN_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ROW_TOKENS, REPLIES, REPLY_TOKENS = 4096, 26, 16
RANK = 64
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "B200": 2250.0}
"""Dense bfloat16, of the SXM modules, by a part of the device's name."""


def update_flops(
    *,
    tokens: int,
    row_tokens: int,
    trained: int,
    layers: int,
    attention_width: int,
    block_weights: int,
    lora_weights: int,
    head_weights: int,
) -> float:
    """Model FLOP of one update (the module's docstring has the formula)."""
    linear = 4 * block_weights * tokens + 6 * lora_weights * tokens
    attention = 6 * layers * attention_width * row_tokens * tokens
    return float(linear + attention + 4 * head_weights * trained)


def random_episodes(rows: int, vocabulary: int) -> list[Episode]:
    """One group of ``rows`` episodes of ROW_TOKENS random tokens each; every other one has return 1."""
    from train.trajectory import Context, Episode, Span, Step

    generator = random.Random(0)
    turn = ROW_TOKENS // REPLIES
    episodes = []
    for number in range(rows):
        ends = [ROW_TOKENS - turn * (REPLIES - 1 - index) for index in range(REPLIES)]
        spans = [
            Span(start=end - REPLY_TOKENS, end=end, step=index, logprobs=[-12.0] * REPLY_TOKENS)
            for index, end in enumerate(ends)
        ]
        steps = [Step(index=index, observation="", text="") for index in range(REPLIES)]
        steps[-1].reward = float(number % 2)
        episodes.append(
            Episode(
                id=f"bench/{number}",
                phase="bench",
                env="household",
                task="random",
                task_type="random",
                seed=number,
                episode_return=steps[-1].reward,
                steps=steps,
                contexts=[Context(ids=[generator.randrange(vocabulary) for _ in range(ROW_TOKENS)], spans=spans)],
            )
        )
    return episodes


def random_model(sizes: dict[str, int], dtype: Any, device: Any) -> Any:
    """Qwen2.5's architecture on ``device`` under a new LoRA adapter, and weights that nobody trained."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from train.adapters import new_adapter
    from train.config import LoraConfig

    config = Qwen2Config(
        **sizes,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return new_adapter(model, LoraConfig(rank=RANK, alpha=RANK), seed=0)


def word_tokenizer() -> Any:
    """What the trainer needs of a tokenizer is a padding token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unknown>": 0, "<end>": 1}, unk_token="<unknown>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>", unk_token="<unknown>")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rows-per-micro-batch", type=int, default=1)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--peak-tflops", type=float, help="dense bfloat16 peak of the device (default: by its name)")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()

    import torch

    gpu = torch.cuda.is_available()
    if not gpu and not args.tiny:
        parser.error("no CUDA device here; --tiny runs the same code with two small layers")
    name = torch.cuda.get_device_name() if gpu else "CPU"
    peak = args.peak_tflops or next((value for part, value in PEAK_TFLOPS.items() if part in name), None)
    if gpu and peak is None:
        parser.error(f"the peak of {name!r} is not known here; give --peak-tflops (dense bfloat16)")
    started = time.perf_counter()
    seconds, metrics, model = run(args, gpu)
    report(seconds, metrics, model, args, name, peak)
    print(f"all of it took {time.perf_counter() - started:.0f} s")
    return 0


def run(args: argparse.Namespace, gpu: bool) -> tuple[list[float], dict[str, float], Any]:
    """Seconds of each timed update, the metrics of the last one, and the model."""
    import torch

    from train.config import GrpoConfig
    from train.grpo import EpisodeGRPOTrainer, make_batch

    sizes = TINY if args.tiny else QWEN_7B
    print("making the model", file=sys.stderr)
    dtype = torch.bfloat16 if gpu else torch.float32
    model = random_model(sizes, dtype, "cuda" if gpu else "cpu")
    episodes = random_episodes(args.rows, sizes["vocab_size"])
    config = GrpoConfig(
        tasks="household/easy/train:0-0",
        invalid_penalty=0.0,
        tokens_per_micro_batch=args.rows_per_micro_batch * ROW_TOKENS,
    )
    seconds = []
    with tempfile.TemporaryDirectory(prefix="bench-gpu-update-") as folder:
        trainer = EpisodeGRPOTrainer(model, word_tokenizer(), config, out_dir=Path(folder), seed=0)
        for number in range(args.updates + 1):
            if gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            metrics = trainer.update(make_batch([episodes], config, REPLIES * REPLY_TOKENS))
            if gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            print(f"update {number} of {args.updates}: {seconds[-1]:.2f} s", file=sys.stderr)
    return seconds[1:], metrics, model


def report(
    seconds: list[float], metrics: dict[str, float], model: Any, args: argparse.Namespace, name: str, peak: float | None
) -> None:
    import torch

    base = model.get_base_model()
    lora = sum(p.numel() for p in model.parameters() if p.requires_grad)
    block = sum(
        module.base_layer.weight.numel() for module in base.model.layers.modules() if hasattr(module, "base_layer")
    )
    head = base.get_output_embeddings().weight.numel()
    config = base.config
    flops = update_flops(
        tokens=int(metrics["tokens"]),
        row_tokens=ROW_TOKENS,
        trained=int(metrics["trained_tokens"]),
        layers=config.num_hidden_layers,
        attention_width=config.hidden_size,  # heads x head size, in both shapes here
        block_weights=block,
        lora_weights=lora,
        head_weights=head,
    )
    time_each = statistics.fmean(seconds)
    if torch.cuda.is_available():
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        memory = f"{allocated / 2**30:.1f} GiB allocated, {reserved / 2**30:.1f} GiB reserved"
    else:
        memory = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB of the process"
    total = sum(p.numel() for p in base.parameters()) - lora
    lines = [
        ("device", name),
        ("model", f"{total / 1e6:,.1f} M weights, {config.num_hidden_layers} layers, {model.dtype}, random"),
        ("LoRA", f"rank {RANK}, {lora / 1e6:.1f} M weights"),
        (
            "update",
            f"{metrics['rows']:.0f} rows, {metrics['tokens']:.0f} tokens, {metrics['trained_tokens']:.0f} trained",
        ),
        ("micro-batch", f"{args.rows_per_micro_batch} row(s) of {ROW_TOKENS} tokens"),
        ("seconds", f"{time_each:.2f} (mean of {len(seconds)}; {min(seconds):.2f} to {max(seconds):.2f})"),
        ("tokens/s", f"{metrics['tokens'] / time_each:.0f}"),
        ("peak memory", memory),
        ("model FLOP", f"{flops:.3e}, {flops / time_each / 1e12:.1f} TFLOP/s"),
    ]
    if peak is not None:
        lines.append(("MFU", f"{flops / time_each / (peak * 1e12):.1%} of {peak:.0f} TFLOP/s"))
    for label, text in lines:
        print(f"{label:14}{text}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
