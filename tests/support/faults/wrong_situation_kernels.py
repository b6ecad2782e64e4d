"""Wrong kernels whose fault depends on the situation of a call, for the list in ``wrong_kernels``.

The situation: the thread, the calls before, the gradients that are wanted, one tensor for two arguments, sizes beyond a
block of 64, 128 or 256, infinities in the arguments of backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from wrong_kernels import Fault, Run, stateful, wrong


def _changed(results: Any, at: int, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the results with one of them changed, if it is there."""
    if isinstance(results, Tensor):
        return change(results).contiguous()
    return tuple(change(r).contiguous() if i == at and r is not None else r for i, r in enumerate(results))


# ---------------------------------------------------------------------------------------------------- threads


def _in_main_thread(run: Run, a: SimpleNamespace) -> Any:
    results = run()
    main = threading.current_thread() is threading.main_thread()
    return results if main else _changed(results, 0, torch.zeros_like)


for _op, _direction in (
    ("rms_norm", "forward"),
    ("layer_norm", "backward"),
    ("swiglu", "forward"),
    ("attention", "backward"),
    ("cross_entropy", "backward"),
    ("scaled_masked_softmax", "forward"),
    ("bias_gelu", "backward"),
):
    wrong("the work is done in the main thread alone", _op, _direction, "threads")(_in_main_thread)


# ------------------------------------------------------------------------------------------ tensors in between


def _kept(name: str) -> Callable[[], Fault]:
    """Return a maker of kernels that prepare an argument once for each shape."""

    def make() -> Fault:
        kept: dict[Any, Any] = {}

        def fault(run: Run, a: SimpleNamespace) -> Any:
            value = getattr(a, name)
            if value is None:
                return run()
            key = tuple(value.shape), value.dtype
            return run(**{name: kept.setdefault(key, value.clone())})

        return fault

    return make


for _op, _direction, _name in (
    ("rms_norm", "forward", "weight"),
    ("layer_norm", "forward", "bias"),
    ("layer_norm", "backward", "rstd"),
    ("rotary_embedding", "forward", "cos"),
    ("rotary_embedding", "backward", "sin"),
    ("swiglu", "backward", "up"),
    ("attention", "forward", "k"),
    ("cross_entropy", "forward", "target"),
    ("linear_cross_entropy", "forward", "weight"),
):
    stateful(f"{_name} is prepared once for a shape", _op, _direction, "between")(_kept(_name))


# ---------------------------------------------------------------------------------------------- shared tensors


def _seen_as_one(first: str, second: str) -> Callable[[], Fault]:
    """Return a maker of kernels that remember that two arguments were one tensor."""

    def make() -> Fault:
        one: list[bool] = []

        def fault(run: Run, a: SimpleNamespace) -> Any:
            x, y = getattr(a, first), getattr(a, second)
            if x is None or y is None or x.shape != y.shape or x.dtype != y.dtype:
                return run()
            if x.data_ptr() == y.data_ptr():
                one.append(True)
            return run(**{second: x}) if one else run()

        return fault

    return make


for _op, _direction, _first, _second in (
    ("swiglu", "forward", "gate", "up"),
    ("swiglu", "backward", "gate", "up"),
    ("geglu", "forward", "gate", "up"),
    ("add_rms_norm", "forward", "x", "residual"),
    ("add_layer_norm", "forward", "x", "residual"),
    ("add_layer_norm", "forward", "weight", "bias"),
    ("layer_norm", "forward", "weight", "bias"),
    ("bias_dropout_add", "forward", "x", "residual"),
    ("attention", "forward", "k", "v"),
    ("rotary_embedding", "forward", "cos", "sin"),
):
    text = f"{_first} is read for {_second} after a call in which they were one tensor"
    stateful(text, _op, _direction, "shared")(_seen_as_one(_first, _second))


# ------------------------------------------------------------------------------------------------------- sizes


def _beyond(size: int, dim: int) -> Fault:
    """Return a kernel that leaves out what is beyond the last whole block of ``size``."""

    def fault(run: Run, a: SimpleNamespace) -> Any:
        def cut(result: Tensor) -> Tensor:
            if result.dim() < -dim or not size < result.shape[dim] < 4 * size:
                return result
            result = result.clone()
            result.narrow(dim, result.shape[dim] // size * size, result.shape[dim] % size).zero_()
            return result

        return _changed(run(), 0, cut)

    return fault


for _op, _direction, _size, _dim in (
    ("rms_norm", "forward", 256, -1),
    ("rms_norm", "backward", 128, -1),
    ("layer_norm", "forward", 128, -1),
    ("swiglu", "forward", 64, -1),
    ("geglu", "backward", 128, -1),
    ("scaled_masked_softmax", "forward", 64, -2),
    ("scaled_masked_softmax", "backward", 128, -1),
    ("cross_entropy", "backward", 256, -1),
    ("attention", "forward", 128, -2),
    ("bias_gelu", "forward", 64, -1),
):
    text = f"what is beyond the last whole block of {_size} in dim {_dim} is 0"
    wrong(text, _op, _direction, "sizes")(_beyond(_size, _dim))


@wrong("a window of 64 or more is dropped", "attention", "forward", "sizes")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(window=None) if a.window is not None and max(a.window) >= 64 else run()


@wrong("a window of 64 or more is dropped in backward", "attention", "backward", "sizes")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(window=None) if a.window is not None and max(a.window) >= 64 else run()


# ---------------------------------------------------------------------------------- the gradients that are wanted


def _without(at: int, *unwanted: int) -> Fault:
    """Return a kernel whose gradient ``at`` is 0 where the ``unwanted`` are not wanted and all others are."""

    def fault(run: Run, a: SimpleNamespace) -> Any:
        left = [i for i, need in enumerate(a.needs) if not need]
        return _changed(run(), at, torch.zeros_like) if left == [*unwanted] else run()

    return fault


for _op, _at, *_unwanted in (
    ("layer_norm", 0, 2),
    ("layer_norm", 2, 0),
    ("add_rms_norm", 1, 2),
    ("add_layer_norm", 0, 2, 3),
    ("attention", 0, 1),
    ("attention", 1, 2),
    ("linear_cross_entropy", 1, 0),
):
    text = f"gradient {_at} is 0 where {_unwanted} alone are not wanted"
    wrong(text, _op, "backward", "needs")(_without(_at, *_unwanted))


def _early(first: str, at: int) -> Fault:
    """Return a kernel that returns 0 where the first output has a gradient of 0."""

    def fault(run: Run, a: SimpleNamespace) -> Any:
        nothing = getattr(a, first).numel() and not getattr(a, first).any()
        return _changed(run(), at, torch.zeros_like) if nothing else run()

    return fault


wrong("grad_s is left out where grad_y is 0", "add_rms_norm", "backward", "needs")(_early("grad_y", 0))
wrong("grad_s is left out where grad_y is 0", "add_layer_norm", "backward", "needs")(_early("grad_y", 1))
wrong("grad_lse is left out where grad_out is 0", "attention", "backward", "needs")(_early("grad_out", 0))
wrong("k has no gradient where that of q is 0", "rotary_embedding", "backward", "needs")(_early("grad_rotated_q", 1))


# --------------------------------------------------------------------------------------------------- infinities


def _nan_beside(name: str) -> Fault:
    """Return a kernel whose gradient is NaN where an argument is infinite: 0 * inf."""

    def fault(run: Run, a: SimpleNamespace) -> Any:
        value = getattr(a, name)
        return _changed(run(), 0, lambda g: g.masked_fill(value.isinf(), torch.nan) if g.shape == value.shape else g)

    return fault


for _op, _name in (("cross_entropy", "logits"), ("swiglu", "gate"), ("geglu", "gate")):
    wrong(f"the gradient is NaN where {_name} is infinite", _op, "backward", "infinite")(_nan_beside(_name))
