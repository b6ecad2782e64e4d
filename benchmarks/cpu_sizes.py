"""Measure the cpu backend beside plain torch and a copy, from 64 elements to 128 MiB.

    python -m benchmarks.cpu_sizes --threads 2 --out benchmarks/results/cpu/sizes-tuned-2.jsonl

Plain torch, the backend and a copy of one operand take turns in one process, so that other programs on the machine
disturb all alike. Times are the 20th percentile of the turns. `kernel` is the backend's function, `fusedops` the public
call with the selection of the backend; a backward is timed through autograd, and is `fusedops` only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import fusedops
import fusedops_cpu

TUNED = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592"
SIZES = [2**6, 2**8, 2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**25]
Turn = Callable[[], object]


def in_turns(work: dict[str, Turn], seconds: float) -> dict[str, float]:
    """Return microseconds of one call of each function, the 20th percentile of turns of about 0.2 ms or one call."""
    repeats: dict[str, int] = {}
    total = 0.0
    for name, call in work.items():
        call()
        start = time.perf_counter()
        call()
        took = time.perf_counter() - start
        repeats[name] = max(1, int(2e-4 / max(took, 1e-7)))
        total += max(took, 2e-4)
    samples: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(max(7, min(400, int(seconds / total)))):
        for name, call in work.items():
            count = repeats[name]
            start = time.perf_counter()
            for _ in range(count):
                result = call()
            samples[name].append((time.perf_counter() - start) / count * 1e6)
            del result
    return {name: statistics.quantiles(taken, n=5)[0] for name, taken in samples.items()}


def softmax(n: int, dtype: torch.dtype, form: str) -> tuple[Turn, Turn, Turn, list[Tensor]]:
    """Return plain torch, the public call, the kernel, and the tensors that take gradients."""
    kernel = fusedops_cpu.scaled_masked_softmax
    sk = min(1024, 1 << (n.bit_length() // 2))
    sq = min(n // sk, 512)
    x = torch.randn(n // sk // sq, sq, sk).to(dtype)
    causal = form == "causal"
    upper = torch.ones(sq, sk, dtype=torch.bool).triu(1)
    random = torch.rand(1, sq, sk) < 1 / 3
    random[..., 0] = False
    masked = {"none": None, "causal": upper, "mask": random}[form]
    mask = random if form == "mask" else None

    def plain() -> Tensor:
        scores = x * 0.125
        return torch.softmax(scores if masked is None else scores.masked_fill(masked, float("-inf")), -1)

    return (
        plain,
        lambda: fusedops.scaled_masked_softmax(x, mask, 0.125, causal=causal),
        lambda: kernel.call(x, mask, 0.125, causal),
        [x],
    )


def rows(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, bias and residual."""
    columns = min(4096, max(64, 1 << (n.bit_length() // 2)))
    shape = (n // columns, columns)
    return torch.randn(shape).to(dtype), torch.randn(columns).to(dtype), torch.randn(shape).to(dtype)


def gelu(n: int, dtype: torch.dtype, form: str) -> tuple[Turn, Turn, Turn, list[Tensor]]:
    """Return the same for bias_gelu."""
    kernel = fusedops_cpu.bias_gelu
    x, bias, _ = rows(n, dtype)
    return (
        lambda: F.gelu(x + bias, approximate=form),
        lambda: fusedops.bias_gelu(x, bias, approximate=form),
        lambda: kernel.call(x, bias, form),
        [x, bias],
    )


def dropout(n: int, dtype: torch.dtype, form: str) -> tuple[Turn, Turn, Turn, list[Tensor]]:
    """Return the same for bias_dropout. The public call draws a seed, the kernel is given one."""
    kernel = fusedops_cpu.bias_dropout
    x, bias, _ = rows(n, dtype)
    seed, training = torch.tensor([1]), form == "training"
    return (
        lambda: F.dropout(x + bias, 0.1, training),
        lambda: fusedops.bias_dropout(x, bias, 0.1, training=training),
        lambda: kernel.call(x, bias, 0.1, training, seed if training else None),
        [x, bias],
    )


def dropout_add(n: int, dtype: torch.dtype, form: str) -> tuple[Turn, Turn, Turn, list[Tensor]]:
    """Return the same for bias_dropout_add."""
    kernel = fusedops_cpu.bias_dropout_add
    x, bias, residual = rows(n, dtype)
    seed, training = torch.tensor([1]), form == "training"
    return (
        lambda: residual + F.dropout(x + bias, 0.1, training),
        lambda: fusedops.bias_dropout_add(x, bias, residual, 0.1, training=training),
        lambda: kernel.call(x, bias, residual, 0.1, training, seed if training else None),
        [x, bias, residual],
    )


def norm(n: int, dtype: torch.dtype, form: str) -> tuple[Turn, Turn, Turn, list[Tensor]]:
    """Return the same for rms_norm and layer_norm, with a weight (and a bias)."""
    x, weight, _ = rows(n, dtype)
    shape, bias = x.shape[-1:], torch.randn_like(weight)
    if form == "rms":
        return (
            lambda: F.rms_norm(x, shape, weight, 1e-6),
            lambda: fusedops.rms_norm(x, weight),
            lambda: fusedops_cpu.rms_norm.call(x, weight, 1e-6, 0.0, False),
            [x, weight],
        )
    return (
        lambda: F.layer_norm(x, shape, weight, bias),
        lambda: fusedops.layer_norm(x, weight, bias),
        lambda: fusedops_cpu.layer_norm.call(x, weight, bias, 1e-5, False),
        [x, weight, bias],
    )


def add_norm(n: int, dtype: torch.dtype, form: str) -> tuple[Turn, Turn, Turn, list[Tensor]]:
    """Return the same for add_rms_norm and add_layer_norm."""
    x, weight, residual = rows(n, dtype)
    shape, bias = x.shape[-1:], torch.randn_like(weight)

    def plain() -> tuple[Tensor, Tensor]:
        s = x + residual
        return (F.rms_norm(s, shape, weight, 1e-6) if form == "rms" else F.layer_norm(s, shape, weight, bias)), s

    if form == "rms":
        return (
            plain,
            lambda: fusedops.add_rms_norm(x, residual, weight),
            lambda: fusedops_cpu.add_rms_norm.call(x, residual, weight, 1e-6, 0.0, False),
            [x, residual, weight],
        )
    return (
        plain,
        lambda: fusedops.add_layer_norm(x, residual, weight, bias),
        lambda: fusedops_cpu.add_layer_norm.call(x, residual, weight, bias, 1e-5, False),
        [x, residual, weight, bias],
    )


def gated(n: int, dtype: torch.dtype, form: str) -> tuple[Turn, Turn, Turn, list[Tensor]]:
    """Return the same for swiglu and geglu, of two tensors, packed halves or interleaved pairs of n outputs."""
    function, layout = form.split()
    gate, _, up = rows(n, dtype)
    packed, interleaved = torch.cat((gate, up), -1), layout == "pairs"

    def plain() -> Tensor:
        g, u = gate, up
        if layout != "two":
            g, u = (packed[..., ::2], packed[..., 1::2]) if interleaved else packed.chunk(2, -1)
        return (F.silu(g) if function == "silu" else F.gelu(g, approximate=function)) * u

    first, second = (gate, up) if layout == "two" else (packed, None)
    leaves = [gate, up] if layout == "two" else [packed]
    if function == "silu":
        return (
            plain,
            lambda: fusedops.swiglu(first, second, interleaved=interleaved),
            lambda: fusedops_cpu.swiglu.call(first, second, None, 1.0, 0.0, interleaved),
            leaves,
        )
    return (
        plain,
        lambda: fusedops.geglu(first, second, approximate=function, interleaved=interleaved),
        lambda: fusedops_cpu.geglu.call(first, second, function, interleaved),
        leaves,
    )


def rotary(n: int, dtype: torch.dtype, form: str) -> tuple[Turn, Turn, Turn, list[Tensor]]:
    """Return the same for rotary_embedding of n elements of q, and a fourth as many of k, beside the chain of models.

    ``form``: halves of (B, N, S, D) or of transposed views of (B, S, N, D), as projections give; or interleaved pairs.
    """
    width, heads = (16, 1) if n < 2**12 else (64, 8)
    positions = n // heads // width
    shapes = [(1, count, positions, width) for count in (heads, max(1, heads // 4))]
    if form == "transposed":
        q, k = (torch.randn(b, s, h, d).to(dtype).transpose(1, 2) for b, h, s, d in shapes)
    else:
        q, k = (torch.randn(shape).to(dtype) for shape in shapes)
    cos, sin = (torch.randn(1, positions, width // 2).to(dtype) for _ in range(2))
    interleaved = form == "pairs"
    double = [
        t[:, None].repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1)[:, None] for t in (cos, sin)
    ]

    def turned(x: Tensor) -> Tensor:
        if interleaved:
            return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)

    return (
        lambda: tuple(x * double[0] + turned(x) * double[1] for x in (q, k)),
        lambda: fusedops.rotary_embedding(q, k, cos, sin, interleaved=interleaved),
        lambda: fusedops_cpu.rotary_embedding.call(q, k, cos, sin, interleaved, -2),
        [q, k],
    )


def loss(n: int, dtype: torch.dtype, form: str) -> tuple[Turn, Turn, Turn, list[Tensor]]:
    """Return the same for cross_entropy of n logits, of 16 to 32000 classes."""
    classes = min(32000, max(16, 1 << (n.bit_length() // 2 + 2)))
    logits = torch.randn(max(1, n // classes), classes).to(dtype)
    target = torch.randint(classes, logits.shape[:1])
    smoothing = 0.1 if form == "smoothed" else 0.0
    return (
        lambda: F.cross_entropy(logits, target, label_smoothing=smoothing),
        lambda: fusedops.cross_entropy(logits, target, label_smoothing=smoothing),
        lambda: fusedops_cpu.cross_entropy.call(logits, target, -100, smoothing, 0.0, None, "mean", None, False),
        [logits],
    )


CASES: list[tuple[str, Any, str]] = [
    ("scaled_masked_softmax", softmax, "none"),
    ("scaled_masked_softmax", softmax, "mask"),
    ("scaled_masked_softmax", softmax, "causal"),
    ("bias_gelu", gelu, "tanh"),
    ("bias_gelu", gelu, "none"),
    ("bias_dropout", dropout, "training"),
    ("bias_dropout_add", dropout_add, "training"),
    ("bias_dropout_add", dropout_add, "evaluation"),
    ("rms_norm", norm, "rms"),
    ("add_rms_norm", add_norm, "rms"),
    ("layer_norm", norm, "layer"),
    ("add_layer_norm", add_norm, "layer"),
    ("swiglu", gated, "silu two"),
    ("swiglu", gated, "silu halves"),
    ("swiglu", gated, "silu pairs"),
    ("geglu", gated, "tanh two"),
    ("geglu", gated, "none two"),
    ("rotary_embedding", rotary, "halves"),
    ("rotary_embedding", rotary, "transposed"),
    ("rotary_embedding", rotary, "pairs"),
    ("cross_entropy", loss, "plain"),
    ("cross_entropy", loss, "smoothed"),
]


def measure(op: str, make: Any, form: str, n: int, dtype: torch.dtype, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield one record for each direction and provider."""
    plain, public, kernel, leaves = make(n, dtype, form)
    source, target = torch.randn(n).to(dtype), torch.empty(n, dtype=dtype)
    copy: Turn = lambda: target.copy_(source)  # noqa: E731
    with torch.no_grad():
        times = {"forward": in_turns({"plain": plain, "fusedops": public, "kernel": kernel, "copy": copy}, seconds)}
    for leaf in leaves:
        leaf.requires_grad_()
    outputs: dict[str, Any] = {"plain": _as_tuple(plain()), "fusedops": _as_tuple(public())}
    grads = [torch.randn_like(y) for y in outputs["plain"]]
    backward: dict[str, Turn] = {
        name: (lambda y=y: torch.autograd.grad(y, leaves, grads, retain_graph=True)) for name, y in outputs.items()
    }
    times["backward"] = in_turns({**backward, "copy": copy}, seconds)
    for direction, by_provider in times.items():
        for provider in by_provider:
            if provider != "copy":
                yield {
                    "op": op,
                    "form": form,
                    "elements": n,
                    "shape": list(outputs["plain"][0].shape),
                    "dtype": str(dtype).removeprefix("torch."),
                    "direction": direction,
                    "provider": provider,
                    "us": round(by_provider[provider], 2),
                    "copies": round(by_provider[provider] / by_provider["copy"], 2),
                    "speedup": round(by_provider["plain"] / by_provider[provider], 2),
                }


def main() -> None:
    """Measure, and write one JSON line a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each case and direction")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--dtypes", nargs="*", default=["float32"])
    parser.add_argument("--ops", nargs="*", default=[])
    parser.add_argument("--allocator", choices=["default", "tuned"], default="tuned")
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.allocator == "tuned" and os.environ.get("GLIBC_TUNABLES") != TUNED:
        os.environ["GLIBC_TUNABLES"] = TUNED
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.cpu_sizes", *sys.argv[1:]])
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    about = {
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "fusedops": fusedops.__version__,
        "commit": commit,
        "threads": options.threads,
        "allocator": options.allocator,
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
    }
    out = open(options.out, "a") if options.out else None  # noqa: SIM115
    with fusedops.use("cpu", fallback="raise"):
        for dtype in options.dtypes:
            for op, make, form in CASES:
                for n in options.sizes if not options.ops or op in options.ops else ():
                    for record in measure(op, make, form, n, getattr(torch, dtype), options.seconds):
                        print(
                            f"{op:22} {form:12} {dtype:8} {n:9} {record['direction']:8} {record['provider']:8} "
                            f"{record['us']:10.1f} us {record['copies']:6.2f} copies {record['speedup']:6.2f} x",
                            flush=True,
                        )
                        if out:
                            out.write(json.dumps({**record, **about}) + "\n")
                            out.flush()


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
