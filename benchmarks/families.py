"""Time of a training step and of generated tokens of models of transformers: plain, and after apply.

    python -m benchmarks.families                              # each family of docs/transformers.md, as small as there
    python -m benchmarks.families --wide Llama GPT-2           # 2 x 512 tokens, width 512, two layers

One model is measured in both states, in turns whose order changes: on a busy machine a ratio of one turn is nearer to
the truth than a ratio of two times of different minutes. The time is the process's on its cores. The last column says
where a step's time goes after apply: the share of the matmuls, which are torch's in both states.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import set_seed

from fusedops.integrations.transformers import apply

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support" / "makers"))

from model_families import FAMILIES, Family

LEAST = 0.1  # seconds of a measurement: shorter calls are repeated
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "n_embd": 512,
    "n_positions": 1024,
    "n_head": 8,
    "sliding_window": 256,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 1376,
    "num_heads": 8,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 1376,
    "decoder_ffn_dim": 1376,
}
MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


def wide(family: Family) -> Family:
    """Return a family with models of width 512, of the values that it has."""
    return replace(family, values={**family.values, **{n: v for n, v in WIDE.items() if n in family.values}})


def inputs_of(family: Family, is_wide: bool) -> dict[str, Any]:
    """Return the inputs of a step: those of the tests, or 2 x 512 tokens, with images and sounds as they are there."""
    inputs: dict[str, Any] = family.inputs()
    if not is_wide:
        return inputs
    ids = torch.randint(3, 64, (2, 512), generator=torch.Generator().manual_seed(0))
    wide = {name: ids if name.endswith("input_ids") else value for name, value in inputs.items()}
    return {name: value for name, value in wide.items() if value is ids or value.is_floating_point()}


def step_of(model: Any, inputs: dict[str, Any]) -> Callable[[], None]:
    """Return a forward and a backward."""

    def step() -> None:
        model.zero_grad()
        model(**inputs)[0].square().mean().backward()  # logits, or the hidden states of an encoder

    return step


def tokens_of(model: Any, inputs: dict[str, Any]) -> Callable[[], None]:
    """Return the generation of 8 tokens."""
    given = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}

    def generate() -> None:
        with torch.no_grad():
            model.generate(**given, max_new_tokens=8, min_new_tokens=8, do_sample=False)

    return generate


def seconds(run: Callable[[], None], repeats: int) -> float:
    """Return the time of a call on the process's cores."""
    started = time.process_time()
    for _ in range(repeats):
        run()
    return (time.process_time() - started) / repeats


def ratios(model: Any, run: Callable[[], None], turns: int) -> list[float]:
    """Return the time after apply divided by plain's, of each turn."""
    run()
    repeats, found = max(1, round(LEAST / max(seconds(run, 1), 1e-6))), list[float]()
    for turn in range(turns):
        times = dict[bool, float]()
        for is_applied in (False, True) if turn % 2 else (True, False):
            applied = apply(model)  # before both: it slows what is measured after it by 1 to 2 %, whatever that is
            if not is_applied:
                applied.remove()
            gc.collect()
            set_seed(0)  # of both alike: wav2vec2 leaves out layers at random
            seconds(run, max(1, repeats // 4))
            times[is_applied] = seconds(run, repeats)
            applied.remove()
        found.append(times[True] / times[False])
    return found


def share_of_matmuls(model: Any, run: Callable[[], None]) -> float:
    """Return the share of the matmuls in the time of torch's functions, after apply."""
    applied = apply(model)
    run()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    applied.remove()
    events = profiler.key_averages()
    whole = sum(event.self_cpu_time_total for event in events)
    return sum(event.self_cpu_time_total for event in events if event.key in MATMULS) / whole


def main() -> None:
    """Print the median ratio of each family, for a step and for tokens, and the share of the matmuls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="names of the page; default: all")
    parser.add_argument("--wide", action="store_true", help="2 x 512 tokens, width 512")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    print(f"{options.threads} threads, torch {torch.__version__}; time after apply, of plain's")
    print(f"{'family':16} {'step':>6} {'tokens':>7}  matmuls")
    for name in options.families or FAMILIES:
        family = wide(FAMILIES[name]) if options.wide else FAMILIES[name]
        try:
            model, inputs = family.build().train(), inputs_of(family, options.wide)
            step = step_of(model, inputs)
            of_step, share = statistics.median(ratios(model, step, options.turns)), share_of_matmuls(model, step)
            generates = family.generates and "input_ids" in inputs
            of_tokens = ratios(model.eval(), tokens_of(model, inputs), options.turns) if generates else []
        except Exception as error:  # a family that has no such size
            print(f"{name:16} {type(error).__name__}: {str(error).splitlines()[0][:80]}", flush=True)
            continue
        tokens = f"{statistics.median(of_tokens):7.2f}" if of_tokens else "      -"
        print(f"{name:16} {of_step:6.2f} {tokens}  {share:5.0%}", flush=True)


if __name__ == "__main__":
    main()
