"""Perplexity of models with packed weights: ``python -m benchmarks.perplexity [--smollm2]``.

Small models of four families learn the characters of three plays of Shakespeare; the perplexity is that of the fourth.
``--smollm2``: SmolLM2-135M-Instruct as it is, on the same play; `make chat` installs what it needs.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from fusedops.integrations.transformers import quantize

EXAMPLES = Path(__file__).parents[1] / "examples"
FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q5_1", "Q4_K", "Q6_K")
LENGTH, BATCH, UNSEEN = 128, 16, 64
_SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3, "head_dim": 64}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "pad_token_id": None}
_SIZES |= {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None}
FAMILIES: dict[str, tuple[Any, dict[str, object]]] = {
    "Llama": (transformers.LlamaConfig, {}),
    "Qwen3": (transformers.Qwen3Config, {}),
    "Gemma 3": (transformers.Gemma3TextConfig, {"query_pre_attn_scalar": 64}),
    "gpt-oss": (transformers.GptOssConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def perplexity(model: Any, pieces: Tensor) -> float:
    """Return exp of the mean loss of pieces (pieces, tokens)."""
    with torch.no_grad():
        losses = [model(input_ids=ids, labels=ids, use_cache=False).loss for ids in pieces.split(BATCH)]
    return torch.stack(losses).mean().exp().item()


def train(model: Any, pieces: Tensor, steps: int) -> Any:
    """Train on random batches, with a rate that falls to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        ids = pieces[torch.randint(len(pieces), (BATCH,), generator=generator)]
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def report(name: str, model: Any, pieces: Tensor) -> None:
    """Print the perplexity of a model, and its rise in each format."""
    plain = perplexity(model, pieces)
    row = [f"{name:10}{plain:9.4f}"]
    for format in FORMATS:
        packed = copy.deepcopy(model)
        quantize(packed, format=format)
        row.append(f"{100 * (perplexity(packed, pieces) / plain - 1):+8.2f} %")
    print("".join(row), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", action="store_true", help="that model, not the four small ones")
    parser.add_argument("--steps", type=int, default=400, help="of the training of a small model (%(default)s)")
    options = parser.parse_args(arguments)
    *seen, unseen = [file.read_text("ascii") for file in sorted((EXAMPLES / "data").glob("*.txt"))]
    print(f"{'model':10}{'float32':>9}{''.join(f'{format:>10}' for format in FORMATS)}")
    if options.smollm2:
        sys.path.insert(0, str(EXAMPLES))
        from smollm2 import load

        tokenizer, model = load("cpu")
        ids = torch.tensor(tokenizer(unseen)["input_ids"])[: UNSEEN * LENGTH].view(-1, LENGTH)
        report("SmolLM2", model.eval(), ids)
        return
    characters = sorted(set("".join([*seen, unseen])))
    numbers = {character: number for number, character in enumerate(characters)}

    def pieces(text: str) -> Tensor:
        return torch.tensor([numbers[each] for each in text])[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)

    for name, (config, changes) in FAMILIES.items():
        torch.manual_seed(0)
        sizes = {**_SIZES, "vocab_size": len(characters), **changes}
        model = transformers.AutoModelForCausalLM.from_config(config(**sizes))
        report(name, train(model, torch.cat(list(map(pieces, seen))), options.steps), pieces(unseen)[:UNSEEN])


if __name__ == "__main__":
    main()
