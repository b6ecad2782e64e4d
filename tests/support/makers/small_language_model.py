"""A small Llama, a tokenizer of words, and texts, for tests of trainers and of the recipes."""

from __future__ import annotations

from typing import Any

import torch

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(58)), "user", "assistant", "\n"]
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def small_llama() -> Any:
    """Return a model with the vocabulary of the tokenizer, the same each time."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, **sizes, pad_token_id=0, eos_token_id=1, bos_token_id=1)
    return transformers.LlamaForCausalLM(config)


def small_tokenizer() -> Any:
    """Return a tokenizer that splits at white space."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made: Any = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=_TEMPLATE, **special)


def words(start: int, length: int) -> str:
    """Return a text of words of the tokenizer."""
    return " ".join(f"w{(start + 7 * at) % 58}" for at in range(length))
