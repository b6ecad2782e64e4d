"""Wrong kernels of sizes beyond 4,096, 65,535 and 2**20, of windows, small eps, threads and gradients wanted alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from wrong_kernels import Fault, Run, stateful, wrong


def _changed(results: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the results with those changed that are numbers."""
    if isinstance(results, Tensor):
        return change(results).contiguous()
    return tuple(
        each if each is None or not each.is_floating_point() else change(each).contiguous() for each in results
    )


# ------------------------------------------------------------------------------------------------------ sizes


def _beyond(name: str, dim: int, most: int) -> Fault:
    """Return a kernel whose result is 0 beyond so many elements of an argument in one dim, or leaves them out."""

    def fault(run: Run, a: SimpleNamespace) -> Any:
        tensor = getattr(a, name)
        if tensor.dim() < -dim or tensor.shape[dim] <= most:
            return run()

        def cut(result: Tensor) -> Tensor:
            result = result.clone()
            at = next((d for d, size in enumerate(result.shape) if size == tensor.shape[dim]), None)
            if at is None:  # a sum over them
                return result * 0.99
            result.narrow(at, most, result.shape[at] - most).zero_()
            return result

        return _changed(run(), cut)

    return fault


for _op, _direction, _name, _dim, _most in (
    ("rms_norm", "forward", "x", -2, 65535),
    ("bias_gelu", "backward", "x", -2, 65535),
    ("cross_entropy", "forward", "logits", -2, 65535),
    ("layer_norm", "backward", "x", -2, 65535),
    ("merge_attention", "forward", "out_a", -1, 65535),
    ("layer_norm", "forward", "x", -1, 65536),
    ("cross_entropy", "backward", "logits", -1, 65536),
    ("swiglu", "backward", "gate", -1, 65536),
    ("top_k_routing", "backward", "logits", -2, 4096),
    ("linear_cross_entropy", "forward", "weight", -2, 65536),
    ("geglu", "forward", "gate", -1, 65535),
    ("scaled_masked_softmax", "forward", "x", -1, 65536),
    ("bias_gelu", "forward", "x", -1, 2**20),
    ("bias_dropout", "forward", "x", -1, 2**20),
    ("attention", "forward", "k", -2, 4096),
    ("attention", "forward", "k", -2, 65535),
    ("attention", "backward", "k", -2, 4096),
    ("causal_conv1d", "forward", "x", -2, 4096),
    ("linear_attention", "forward", "q", -3, 4096),
    ("varlen_attention", "forward", "k", -3, 4096),
    ("linear_attention", "backward", "v", -1, 4096),
    ("rotary_embedding", "forward", "q", -1, 65535),
):
    text = f"beyond {_most:,} in dim {_dim} of {_name} the result is 0"
    wrong(text, _op, _direction, "sizes")(_beyond(_name, _dim, _most))


def _short(side: int) -> Fault:
    def fault(run: Run, a: SimpleNamespace) -> Any:
        if a.window is None or a.window[side] < 64:
            return run()
        window = [*a.window]
        window[side] -= 1
        return run(window=tuple(window))

    return fault


for _op in ("attention", "varlen_attention"):
    for _direction in ("forward", "backward"):
        wrong("a window of 64 keys and more is one key short", _op, _direction, "sizes")(_short(0))
        wrong("a window of 64 later keys and more is one short", _op, _direction, "sizes")(_short(1))


# -------------------------------------------------------------------------------------------------- small eps


def _least_eps(run: Run, a: SimpleNamespace) -> Any:
    return run(eps=max(a.eps, 1e-7))


for _op in ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "gated_rms_norm"):
    wrong("eps is 1e-7 at least", _op, "forward", "calls")(_least_eps)


@wrong("eps is added to the root", "rms_norm", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(eps=a.eps**2) if 0 < a.eps < 1e-7 else run()


# ---------------------------------------------------------------------------------------------------- threads


def _third(run: Run, a: SimpleNamespace) -> Any:
    """Leave out the last rows where three threads share them."""

    def cut(result: Tensor) -> Tensor:
        result = result.clone()
        flat = result.view(-1)
        flat[flat.numel() // 3 * 3 :] = 0
        return result if flat.numel() % 3 else result * 2

    return _changed(run(), cut) if torch.get_num_threads() == 3 else run()


for _op, _direction in (("swiglu", "forward"), ("layer_norm", "backward"), ("attention", "forward")):
    wrong("three threads leave out what is left", _op, _direction, "threads")(_third)


@wrong("three threads leave out what is left of a large call", "bias_gelu", "forward", "sizes")
def _(run: Run, a: SimpleNamespace) -> Any:
    return _third(run, a) if a.x.numel() > 2**15 else run()


def _buffer(pause: float) -> Callable[[], Fault]:
    """Return a maker of kernels that compute in a buffer, which two calls at a time share, and return a copy."""

    def make() -> Fault:
        buffers: dict[Any, Tensor] = {}

        def fault(run: Run, a: SimpleNamespace) -> Any:
            def through(result: Tensor) -> Tensor:
                buffer = buffers.setdefault((result.shape, result.dtype), torch.empty_like(result))
                buffer.copy_(result)
                time.sleep(pause)
                return buffer.clone()

            return _changed(run(), through)

        return fault

    return make


for _op, _direction, _pause in (
    ("scaled_masked_softmax", "forward", 1e-4),
    ("rms_norm", "backward", 1e-4),
    ("rotary_embedding", "forward", 0.0),
    ("linear_cross_entropy", "backward", 0.0),
):
    stateful("two calls at a time share a buffer", _op, _direction, "threads")(_buffer(_pause))


@stateful("the argument is read from where the last call put it", "geglu", "forward", "threads")
def _() -> Fault:
    last: dict[str, Tensor] = {}

    def fault(run: Run, a: SimpleNamespace) -> Any:
        last["up"] = a.up
        time.sleep(1e-4)
        up = last["up"]
        return run(up=up if up.shape == a.up.shape else a.up)

    return fault


# ---------------------------------------------------------------------------------- gradients that are wanted


def _without(name: str, *needs: int) -> Fault:
    """Return a kernel that leaves out the gradient of an output where none of these gradients is wanted."""

    def fault(run: Run, a: SimpleNamespace) -> Any:
        left_out = not any(a.needs[at] for at in needs)
        return run(**{name: torch.zeros_like(getattr(a, name))}) if left_out else run()

    return fault


for _op, _name, *_needs in (
    ("attention", "grad_lse", 2),
    ("varlen_attention", "grad_lse", 2),
    ("attention", "grad_lse", 1, 2),
    ("add_rms_norm", "grad_s", 1),
    ("add_layer_norm", "grad_s", 2, 3),
    ("linear_attention", "grad_state", 0, 1),
):
    text = f"{_name} is left out where the gradients {_needs} are not wanted"
    wrong(text, _op, "backward", "needs")(_without(_name, *_needs))


@wrong("the gradient of x is 0 where that of the weight alone is not wanted", "gated_rms_norm", "backward", "needs")
def _(run: Run, a: SimpleNamespace) -> Any:
    alone = [at for at, need in enumerate(a.needs) if not need] == [len(a.needs) - 1]
    return _changed(run(), torch.zeros_like) if alone else run()
