"""Time and memory of a training step of a model of transformers: plain, after apply, and with the fused loss.

    python -m benchmarks.train_step                        # the sizes of SmolLM2-135M, 2 x 512 tokens, float32
    python -m benchmarks.train_step --dtype bfloat16 --threads 1 --turns 3
    MALLOC_MMAP_THRESHOLD_=65536 python -m benchmarks.train_step --memory

One model with random weights is measured in its three states: apply and remove change it in between. In each turn
every state runs one step (forward, backward, AdamW), and the order changes from turn to turn: on a busy machine a ratio
of one turn is nearer to the truth than a ratio of two times of different minutes. The time is the process's on its
cores, which other processes change less than the time of a clock. The peaks are of torch's tensors; ``--memory`` prints
those of the process, with the buffers of libraries, and no times (Linux).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers

from benchmarks.idle import exp2_ns
from benchmarks.memory import peak_bytes, resident_peak_bytes
from fusedops.integrations.transformers import apply

STATES: dict[str, dict[str, Any] | None] = {"plain": None, "apply": {}, "fused loss": {"fused_loss": True}}
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


def within(model: Any, state: str, run: Callable[[], Any]) -> Any:
    """Return the result of a call with the model in a state; the change of the state is no part of the call."""
    options = STATES[state]
    applied = None if options is None else apply(model, **options)
    result = run()
    if applied is not None:
        applied.remove()
    return result


def main() -> None:
    """Print the losses, the peaks, and the ratios of the times in each turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--layers", type=int, default=SMOLLM2["num_hidden_layers"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--memory", action="store_true", help="the peaks of the process alone")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SMOLLM2, "num_hidden_layers": options.layers})
    model: Any = transformers.LlamaForCausalLM(config).to(getattr(torch, options.dtype)).train()
    ids = torch.randint(config.vocab_size, (options.batch, options.length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def gradients() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def step() -> float:
        started = time.process_time()
        gradients()
        optimizer.step()
        return time.process_time() - started

    print(
        f"{options.dtype}, {options.threads} threads, {options.batch} x {options.length} tokens, "
        f"torch {torch.__version__}"
    )
    own: dict[str, torch.Tensor] = {}
    for state in STATES:
        loss = within(model, state, gradients)
        found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        own = own or found
        worst = max(float((found[name] - own[name]).norm() / own[name].norm()) for name in own)
        print(f"{state:12} loss {float(loss):.6f}, gradients differ by {worst:.1e}", flush=True)
    own.clear()
    within(model, "plain", step)  # AdamW's state is there from now on
    optimizer.zero_grad()
    peaks: dict[str, int] = {}
    for state in STATES:
        measure = resident_peak_bytes if options.memory else partial(peak_bytes, device="cpu")
        peaks[state] = within(model, state, partial(measure, gradients))
        optimizer.zero_grad()
        print(
            f"{state:12} peak {peaks[state] / 2**20:.0f} MiB, {peaks[state] / peaks['plain']:.2f} of plain", flush=True
        )
    if options.memory:
        return
    times: dict[str, list[float]] = {state: [] for state in STATES}
    for turn in range(options.turns):
        for state in list(STATES) if turn % 2 else reversed(STATES):
            times[state].append(within(model, state, step))
        print(f"turn {turn + 1}: {exp2_ns():.2f} ns per exp2", flush=True)
    for state in STATES:
        ratios = [one / other for one, other in zip(times[state], times["plain"])]
        each = " ".join(f"{ratio:.2f}" for ratio in ratios)
        seconds, ratio = statistics.median(times[state]), statistics.median(ratios)
        print(f"{state:12} {seconds:.2f} s, {ratio:.2f} of plain; turns {each}")


if __name__ == "__main__":
    main()
