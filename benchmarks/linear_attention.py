"""linear_attention, causal_conv1d on a CPU beside transformers' torch code: ``python -m benchmarks.linear_attention``.

In turns in one process, medians of milliseconds, at the sizes of Qwen3-Next (32 heads of 128 on 16 of keys), of half of
its value heads, and of Mamba-2 (64 heads of 64, states of 128); a convolution of width 4, beside a copy too. ``--memory
KIND`` prints instead what a training step of 16 heads over 4,096 positions takes beyond its arguments: run it with
"cpu" and with "transformers", each in a process of its own.
"""

from __future__ import annotations

import argparse
import inspect
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

import fusedops

CHUNKED, STEP = map(
    inspect.unwrap, (qwen3_next.torch_chunk_gated_delta_rule, qwen3_next.torch_recurrent_gated_delta_rule)
)
SCAN, NEXT = map(inspect.unwrap, (mamba2.mamba2_chunk_scan, mamba2.mamba2_selective_state_update))
UPDATE = inspect.unwrap(qwen3_next.causal_conv1d_update)
Work = Callable[[], object]


def row(name: str, theirs: Work, ours: Work, turns: int, calls: int = 1) -> None:
    """Print the medians of both in turns, and their ratio. A result is freed before the next call, as in generation."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns + 1):
        for work, of_one in zip((theirs, ours), times):
            started = time.perf_counter()
            for _ in range(calls):
                work()
            if turn:  # the first one only warms up
                of_one.append(1e3 * (time.perf_counter() - started) / calls)
    before, now = map(statistics.median, times)
    load = os.getloadavg()[0]
    print(f"| {name} | {before:.3g} | {now:.3g} | {before / now:.1f} | load {load:.1f} |", flush=True)


def delta_rule(heads: int, positions: int) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v, decay and beta of a gated delta rule, and a state."""
    q, k, v = (torch.randn(1, positions, count, 128) for count in (16, 16, heads))
    numbers = -torch.rand(1, positions, heads) * 0.2, torch.rand(1, positions, heads)
    return [q, k, v, *numbers], torch.randn(1, heads, 128, 128)


def attended(args: Sequence[Tensor], state: Tensor | None) -> Tensor:
    """Return the output by the op."""
    return fusedops.linear_attention(*args, normalize=True, initial_state=state, return_state=True, backend="cpu")[0]


def attended_by(function: Callable[..., Any], args: Sequence[Tensor], state: Tensor | None) -> Tensor:
    """Return the output by transformers' function, which has a key head for each value head."""
    q, k, v, decay, beta = args
    q, k = (each.repeat_interleave(v.shape[2] // each.shape[2], 2) for each in (q, k))
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return function(q, k, v, g=decay, beta=beta, **options)[0]


def step(function: Callable[..., Tensor], leaves: Sequence[Tensor], grad: Tensor) -> object:
    """Run forward and backward."""
    return torch.autograd.grad(function(leaves), leaves, grad)


def delta_rules() -> None:
    """Measure the gated delta rule."""
    for heads in (32, 16):
        name = f"gated delta rule, {heads} heads of 128 on 16 of keys"
        with torch.no_grad():
            for positions, function, turns, calls in ((1, STEP, 50, 10), (2048, CHUNKED, 5, 1)):
                args, state = delta_rule(heads, positions)
                theirs, ours = partial(attended_by, function, args, state), partial(attended, args, state)
                row(f"{name}: {positions} positions", theirs, ours, turns, calls)
        leaves = [each.requires_grad_() for each in delta_rule(heads, 1024)[0]]
        grad = torch.randn_like(leaves[2])
        theirs = partial(step, lambda args: attended_by(CHUNKED, args, None), leaves, grad)
        ours = partial(step, lambda args: attended(args, None), leaves, grad)
        row(f"{name}: 1024 positions, forward and backward", theirs, ours, 5)


def scans() -> None:
    """Measure Mamba-2's scan."""
    heads, size, states = 64, 64, 128

    def numbers(positions: int) -> list[Tensor]:
        sizes = (heads, size), (1, states), (1, states), (heads,)
        x, b, c, dt = (torch.randn(1, positions, *each) for each in sizes)
        return [x, b, c, dt.sigmoid() * 0.1]

    a = -torch.rand(heads) * 8

    def ours(args: Sequence[Tensor], state: Tensor | None = None) -> Tensor:
        x, b, c, dt = args
        options = {"scale": 1.0, "initial_state": state, "return_state": True, "backend": "cpu"}
        return fusedops.linear_attention(c, b, x * dt[..., None], dt * a, **options)[0]

    def theirs(args: Sequence[Tensor]) -> Tensor:
        x, b, c, dt = args
        return SCAN(x, dt, a, b, c, 256, return_final_states=True)[0]

    name = f"Mamba-2, {heads} heads of {size}, states of {states}"
    with torch.no_grad():
        args, state = numbers(1), torch.randn(1, heads, size, states)
        x, b, c, dt = (each[:, 0] for each in args)
        rates, steps = a[:, None, None].expand(heads, size, states), dt[..., None].expand(1, heads, size)
        turned = state.mT.contiguous()
        own = lambda: NEXT(state.clone(), x, steps, rates, b, c)  # noqa: E731 - it writes the state in place
        row(f"{name}: 1 position", own, partial(ours, args, turned), 15, 10)
        args = numbers(2048)
        row(f"{name}: 2048 positions", partial(theirs, args), partial(ours, args), 3)
    leaves = [each.requires_grad_() for each in numbers(512)]
    grad = torch.randn_like(leaves[0])
    row(f"{name}: 512 positions, forward and backward", partial(step, theirs, leaves, grad),
        partial(step, ours, leaves, grad), 3)  # fmt: skip


@torch.no_grad()
def convolutions() -> None:
    """Measure the convolution of width 4 with silu."""
    x, weight = torch.randn(1, 4096, 2048), torch.randn(4096, 4)
    op = partial(fusedops.causal_conv1d, activation="silu", backend="cpu")

    def theirs() -> Tensor:
        y = functional.conv1d(x, weight[:, None], padding=3, groups=4096)
        return functional.silu(y[..., :2048])

    row("convolution, 4096 channels: 2048 positions", theirs, partial(op, x, weight), 25)
    y = torch.empty_like(x)
    row("a copy beside the same", partial(y.copy_, x), partial(op, x, weight), 25)
    token, inputs, before = torch.randn(1, 4096, 1), torch.randn(1, 4096, 4), torch.randn(1, 4096, 3)
    ours = partial(op, token, weight, initial_state=before, return_state=True)
    row("convolution, 4096 channels: 1 position", partial(UPDATE, token, inputs, weight, None, "silu"), ours, 25, 20)


def memory(kind: str) -> None:
    """Print the largest memory of a training step beyond its arguments."""
    function: Callable[..., Tensor] = attended if kind == "cpu" else partial(attended_by, CHUNKED)
    few, many = (delta_rule(16, positions)[0] for positions in (64, 4096))
    used = 0
    for args in (few, many):  # the few positions load the code
        leaves, grad = [each.requires_grad_() for each in args], torch.randn_like(args[2])
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        step(lambda leaves: function(leaves, None), leaves, grad)
    print(f"{kind}: {(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used) / 1024:.0f} MB")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", choices=("cpu", "transformers"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.memory:
        memory(options.memory)
        return
    print("| call | transformers, ms | cpu, ms | ratio | |\n|---|---|---|---|---|")
    delta_rules()
    scans()
    convolutions()


if __name__ == "__main__":
    main()
