"""A random language model of a few thousand weights, for tests of training."""

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 32


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words w0 to w31; it pads with its end token, as SmolLM2's does."""
    words = {f"w{i}": i for i in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        eos_token="w2",
        pad_token="w2",
        unk_token="w0",
    )


def tiny_base(width: int = 16, layers: int = 2) -> LlamaForCausalLM:
    """The same weights each time, large enough that its distributions are far from uniform."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval()
