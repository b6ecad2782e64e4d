"""Time and memory of attention beside a direct call of torch's scaled_dot_product_attention, in paired turns.

    python -m benchmarks.attention                                  # [2, 16, 2048, 64] on the CPU
    python -m benchmarks.attention --shape 1 4 256 64 --turns 3     # a short run
    python -m benchmarks.attention --device cuda --dtypes bfloat16
    python -m benchmarks.attention --forms decode --shape 1 32 4096 128
    python -m benchmarks.attention --forms window --shape 1 8 8192 64

"decode" is one query of each head over S keys, of which 8 query heads share a head; "window" is causal, over the last
512 keys, for which torch has a mask. In each turn both run once, and the
order changes from turn to turn. Of "values" torch takes its path that keeps all scores, because the values have another
width. The last lines are the time to choose: a call without work, beside the function of the selected backend and a
direct call.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import fusedops
from benchmarks.memory import peak_bytes
from fusedops._plugins.registry import registry

FORMS = ("causal", "padded", "values", "decode", "window")
WINDOW = 511, 0
SHORT = 5e-3  # seconds of a measurement: shorter calls are repeated
SMALL = (2, 2, 4, 8)


class Call(NamedTuple):
    """The tensors of a call, the gradient of its output, and ours and torch's function of the tensors."""

    leaves: tuple[Tensor, Tensor, Tensor]
    grad: Tensor
    functions: dict[str, Callable[..., Tensor]]


def call_of(form: str, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> Call:
    """Return a call of a form. The masks are made once, as a model makes them."""
    batch, heads, length, width = shape
    if form == "decode":
        of_keys = (batch, max(1, heads // 8), length, width)
        q, k, v = (torch.randn(s, device=device).to(dtype) for s in ((batch, heads, 1, width), of_keys, of_keys))
        return Call(
            (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()),
            torch.randn_like(q),
            {
                "torch": lambda q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True),
                "fusedops": lambda q, k, v: fusedops.attention(q, k, v),
            },
        )
    value_shape = (*shape[:3], width // 2) if form == "values" else shape
    q, k, v = (torch.randn(s, device=device).to(dtype).requires_grad_() for s in (shape, shape, value_shape))
    grad = torch.randn(value_shape, device=device).to(dtype)
    if form == "window":
        hidden = fusedops.masks.from_band(
            length, length, fusedops.masks.band(length, length, "upper_left", WINDOW), device
        )
        return Call(
            (q, k, v),
            grad,
            {
                "torch": lambda q, k, v, seen=~hidden: scaled_dot_product_attention(q, k, v, attn_mask=seen),
                "fusedops": lambda q, k, v: fusedops.attention(q, k, v, causal=True, window=WINDOW),
            },
        )
    if form != "padded":
        return Call(
            (q, k, v),
            grad,
            {
                "torch": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
                "fusedops": lambda q, k, v: fusedops.attention(q, k, v, causal=True),
            },
        )
    lengths = torch.linspace(length * 0.75, length, batch, device=device).long()
    padding = fusedops.masks.from_lengths(lengths, length)
    seen = ~padding
    return Call(
        (q, k, v),
        grad,
        {
            "torch": lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=seen),
            "fusedops": lambda q, k, v: fusedops.attention(q, k, v, padding),
        },
    )


def runs(call: Call, direction: str) -> dict[str, Callable[[], Any]]:
    """Return a function of each provider: inference, or forward and backward."""

    def inference(function: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return function(*call.leaves)

    def training(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*call.leaves), call.leaves, call.grad)

    run = inference if direction == "inference" else training
    return {name: lambda function=function: run(function) for name, function in call.functions.items()}


def seconds(run: Callable[[], object], device: str, repeats: int = 1) -> float:
    """Return the time of a call."""
    wait = (lambda: None) if device == "cpu" else torch.get_device_module(device).synchronize
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    wait()
    return (time.perf_counter() - start) / repeats


def in_turns(work: dict[str, Callable[[], Any]], device: str, turns: int, repeats: int = 1) -> dict[str, list[float]]:
    """Return the times of each function; the first turn is a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(turns + 1):
        order = list(work.items())
        for name, run in order if turn % 2 else reversed(order):
            took = seconds(run, device, repeats)
            if turn:
                times[name].append(took)
    return times


def measure(form: str, dtype: torch.dtype, options: argparse.Namespace) -> None:
    """Print one line for each direction."""
    call = call_of(form, tuple(options.shape), dtype, options.device)
    for direction in ("inference", "training"):
        work = runs(call, direction)
        peaks = {name: peak_bytes(run, options.device) for name, run in work.items()}
        repeats = max(1, round(SHORT / seconds(work["torch"], options.device)))
        times = in_turns(work, options.device, options.turns, repeats)
        ratios = [ours / theirs for ours, theirs in zip(times["fusedops"], times["torch"])]
        ours, theirs = (1000 * statistics.median(times[name]) for name in ("fusedops", "torch"))
        what = f"{form:8} {str(dtype).removeprefix('torch.'):9} {direction:9}"
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        mega = {name: peak / 1e6 for name, peak in peaks.items()}
        memory = f"{mega['fusedops']:.1f} and {mega['torch']:.1f} MB, ratio {mega['fusedops'] / mega['torch']:.3f}"
        print(f"{what}  fusedops {ours:.2f} ms, torch {theirs:.2f} ms, ratio {spread};  peak {memory}", flush=True)


def choosing(options: argparse.Namespace) -> None:
    """Print the microseconds of a call with little work, of the kernel's function and of torch's."""
    q, k, v = (torch.randn(SMALL, device=options.device) for _ in range(3))
    args = (q, k, v, None, None, "none", None, False)
    backend = fusedops.explain("attention", q, k, v).backend
    (kernel,) = (
        kernel
        for record in registry.records()
        if record.name == backend and record.backend is not None
        for kernel in record.backend.kernels
        if (kernel.op, kernel.direction) == ("attention", "forward") and kernel.serves(q.device.type)
    )
    work: dict[str, Callable[[], Any]] = {
        "fusedops": lambda: fusedops.attention(q, k, v),
        "kernel": lambda: kernel.call(*args),
        "torch": lambda: scaled_dot_product_attention(q, k, v),
    }
    with torch.no_grad():
        times = in_turns(work, options.device, max(options.turns, 20), repeats=1000)
    micros = {name: 1e6 * statistics.median(each) for name, each in times.items()}
    beyond = statistics.median(1e6 * (one - other) for one, other in zip(times["fusedops"], times["kernel"]))
    print(
        f"choosing {list(SMALL)}: fusedops {micros['fusedops']:.2f} us, the function of {backend} "
        f"{micros['kernel']:.2f} us, torch {micros['torch']:.2f} us; choosing takes {beyond:.2f} us"
    )


def main() -> None:
    """Print times, memory and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=4, default=[2, 16, 2048, 64], metavar=("B", "N", "S", "D"))
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=FORMS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"{options.shape} on {options.device}, {options.threads} threads, torch {torch.__version__}")
    for form in options.forms:
        for dtype in options.dtypes:
            measure(form, getattr(torch, dtype), options)
    choosing(options)


if __name__ == "__main__":
    main()
