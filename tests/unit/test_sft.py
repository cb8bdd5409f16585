import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_policy import tiny_base, word_tokenizer
from train.adapters import new_adapter
from train.config import ConfigError, LoraConfig, WarmStartConfig
from train.logprobs import batch_tensors, trained_logprobs
from train.rows import Row, padded_length
from train.sft import optimiser_batches, train_sft

pytestmark = pytest.mark.unit


def row(ids: list[int], trained: list[int]) -> Row:
    return Row(ids, [i in trained for i in range(len(ids))], [math.nan] * len(ids), [0] * len(ids))


ROWS = [
    row([1, 5, 9, 4, 7, 8], [2, 3, 5]),
    row([1, 6, 3, 11], [1, 2, 3]),
    row([1, *range(3, 30), *range(3, 30), *range(3, 30)], list(range(40, 60))),
    row([1, 13, 14, 15, 16, 17, 2], [4, 6]),
]


def lora_weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def run(tmp_path: Path, rows: list[Row], **settings):
    model = new_adapter(tiny_base(), LoraConfig(rank=8, alpha=16), 0)
    logged: list[tuple[int, dict[str, float]]] = []
    config = WarmStartConfig(tasks="household/easy/train:0-3", **settings)
    result = train_sft(
        model, word_tokenizer(), rows, config, seed=3, out_dir=tmp_path, log=lambda s, m: logged.append((s, m))
    )
    return model, result, logged


def test_logprobs_of_trained_tokens_equal_the_full_softmax() -> None:
    model = new_adapter(tiny_base(), LoraConfig(rank=8, alpha=16), 0)
    batch = batch_tensors(ROWS, pad_id=2)
    assert batch["input_ids"].shape == (4, 128)
    logprobs, entropy = trained_logprobs(model, **batch, temperature=0.7)
    full = torch.log_softmax(
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits / 0.7, dim=-1
    )
    expected = [full[r, t - 1, row.ids[t]] for r, row in enumerate(ROWS) for t in range(len(row)) if row.trained[t]]
    assert len(expected) == 3 + 3 + 20 + 2
    torch.testing.assert_close(logprobs, torch.stack(expected))
    distribution = torch.distributions.Categorical(logits=full[0, 1])
    torch.testing.assert_close(entropy[0], distribution.entropy())
    assert not entropy.requires_grad


def test_tokens_that_are_not_trained_carry_no_loss_and_no_gradient(tmp_path: Path) -> None:
    # The last token of each row is never a target here, nor does any target see it: other ids must change nothing.
    def rows(last: int) -> list[Row]:
        return [row([1, 5, 9, 4, last], [2, 3]), row([1, 6, 3, last], [2])]

    first, result, _ = run(tmp_path / "a", rows(7), epochs=1)
    second, other, _ = run(tmp_path / "b", rows(21), epochs=1)
    assert torch.equal(lora_weights(first), lora_weights(second))
    assert result["first_loss"] == other["first_loss"]
    assert result["trained_tokens"] == 3


def test_loss_is_the_mean_over_trained_tokens_of_the_step(tmp_path: Path) -> None:
    model = new_adapter(tiny_base(), LoraConfig(rank=8, alpha=16), 0)
    with torch.no_grad():
        expected = -trained_logprobs(model, **batch_tensors(ROWS, pad_id=2))[0].mean()
    _, result, logged = run(tmp_path, ROWS, epochs=1, tokens_per_micro_batch=128)
    assert result["steps"] == 1
    assert [step for step, _ in logged] == [1]
    assert result["first_loss"] == pytest.approx(float(expected), rel=1e-5)
    assert logged[0][1]["loss"] == result["first_loss"]
    assert result["tokens"] == 6 + 4 + 82 + 7
    assert result["padding_share"] == pytest.approx(1 - 99 / (128 + 128 + 64))


@pytest.mark.parametrize("micro_batch", [64, 192])
def test_micro_batches_change_no_update(tmp_path: Path, micro_batch: int) -> None:
    reference, _, _ = run(tmp_path / "a", ROWS, epochs=1, tokens_per_micro_batch=4096)
    model, _, _ = run(tmp_path / "b", ROWS, epochs=1, tokens_per_micro_batch=micro_batch)
    torch.testing.assert_close(lora_weights(model), lora_weights(reference), atol=1e-5, rtol=0)


def test_loss_falls_and_the_model_comes_back_in_eval_mode(tmp_path: Path) -> None:
    model, result, logged = run(tmp_path, ROWS, epochs=30, learning_rate=1e-2, tokens_per_batch=192)
    assert result["loss"] < 0.5 * result["first_loss"]
    assert not any(module.training for module in model.modules())
    rates = [metrics["learning_rate"] for _, metrics in logged]
    peak = round(0.1 * len(rates))
    assert rates[:peak] == sorted(rates[:peak])
    assert max(rates) == pytest.approx(1e-2)
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_no_rows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^0 rows with trained tokens to fine-tune on; raise episodes"):
        run(tmp_path, [], epochs=1)


def test_optimiser_batches_by_hand() -> None:
    # Padded lengths 64, 64, 128 against a budget of 128: whichever the order, the long row is alone.
    batches = optimiser_batches([10, 64, 100], 1, 128, seed=0)
    assert sorted(map(sorted, batches)) in ([[0, 1], [2]], [[0], [1], [2]])
    assert optimiser_batches([], 2, 128, seed=0) == []


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.integers(1, 3), st.integers(64, 1024))
def test_each_epoch_takes_every_row_once_within_the_budget(lengths: list[int], epochs: int, budget: int) -> None:
    batches = optimiser_batches(lengths, epochs, budget, seed=1)
    assert sorted(i for batch in batches for i in batch) == sorted(list(range(len(lengths))) * epochs)
    assert all(sum(padded_length(lengths[i]) for i in batch) <= budget or len(batch) == 1 for batch in batches)


def test_a_broken_epoch_takes_its_share() -> None:
    batches = optimiser_batches([10] * 8, 1.5, 64, seed=1)
    assert len(batches) == 12
    assert sorted({i for batch in batches[:8] for i in batch}) == list(range(8))
