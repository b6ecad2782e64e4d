"""Wrong kernels whose results are right numbers in tensors of another kind, or that hold or write their inputs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from wrong_kernels import Fault, Run, stateful, wrong

from fusedops._torch import negative_view

# ---------------------------------------------------------------------------------------------------- results


class Scaled(Tensor):
    """A subclass without methods of its own."""


def _of_large_memory(y: Tensor) -> Tensor:
    return torch.cat([y.view(-1), y.new_zeros(4096)])[: y.numel()].view(y.shape)


def _inference(y: Tensor) -> Tensor:
    with torch.inference_mode():
        return y.clone()


def _each(change: Callable[[Tensor], Tensor]) -> Fault:
    def fault(run: Run, a: SimpleNamespace) -> Any:
        results = run()
        if isinstance(results, Tensor):
            return change(results)
        return tuple(change(each) if each is not None and each.is_floating_point() else each for each in results)

    return fault


for _text, _op, _direction, _change in (
    ("the output is a negative view", "bias_gelu", "forward", lambda y: negative_view(-y)),
    ("the gradients are negative views", "geglu", "backward", lambda y: negative_view(-y)),
    ("the output is a view of a large memory", "rms_norm", "forward", _of_large_memory),
    ("the gradients are views of a large memory", "swiglu", "backward", _of_large_memory),
    ("the output is an inference tensor", "layer_norm", "forward", _inference),
    ("the gradients are inference tensors", "cross_entropy", "backward", _inference),
    ("the output is of a subclass", "scaled_masked_softmax", "forward", lambda y: y.as_subclass(Scaled)),
    ("the output is a parameter", "swiglu", "forward", lambda y: torch.nn.Parameter(y, requires_grad=False)),
    ("the output is a leaf with a gradient", "rotary_embedding", "forward", lambda y: y.detach().requires_grad_()),
):
    wrong(_text, _op, _direction, "float64")(_each(_change))


# ----------------------------------------------------------------------------------------------------- inputs


def _holding(name: str, of: Callable[[Tensor], Any] = lambda tensor: tensor) -> Callable[[], Fault]:
    """Return a maker of kernels that hold an argument after the call."""

    def make() -> Fault:
        held: dict[Any, Any] = {}

        def fault(run: Run, a: SimpleNamespace) -> Any:
            tensor = getattr(a, name)
            if tensor is not None:
                held[tensor.shape, tensor.dtype] = of(tensor)
            return run()

        return fault

    return make


for _text, _op, _direction, _name, _of in (
    ("x of the last call is held", "rms_norm", "forward", "x", lambda x: x),
    ("a view of x is held", "layer_norm", "backward", "x", lambda x: x.detach()[..., :1]),
    ("a function holds k", "attention", "forward", "k", lambda k: k.sum),
    ("the gradient is held", "geglu", "backward", "grad", lambda grad: [grad]),
    ("the classes are held", "cross_entropy", "forward", "target", lambda target: target.untyped_storage()),
):
    stateful(_text, _op, _direction, "inputs")(_holding(_name, _of))


@stateful("the last output is held", "swiglu", "forward", "inputs")
def _() -> Fault:
    held: list[Any] = []

    def fault(run: Run, a: SimpleNamespace) -> Any:
        held[:] = [run()]
        return held[0]

    return fault


def _put_back(name: str, write: Callable[[Tensor], object]) -> Fault:
    def fault(run: Run, a: SimpleNamespace) -> Any:
        results = run()
        if getattr(a, name) is not None and getattr(a, name).numel():
            write(getattr(a, name))
        return results

    return fault


def _by_numpy(tensor: Tensor) -> None:
    array = tensor.detach().view(torch.uint8).numpy()
    first = array.flat[0]
    array.flat[0] = first ^ 1
    array.flat[0] = first


def _by_address(tensor: Tensor) -> None:
    address = tensor.data_ptr()
    ctypes.memmove(address, ctypes.string_at(address, tensor.itemsize), tensor.itemsize)


for _text, _op, _direction, _name, _write in (
    ("x is written by numpy and put back", "bias_gelu", "forward", "x", _by_numpy),
    ("the first element of grad is written with itself", "scaled_masked_softmax", "backward", "grad", _by_address),
    ("the weight is written and put back", "rms_norm", "backward", "weight", _by_address),
    ("the classes are written by numpy and put back", "cross_entropy", "forward", "target", _by_numpy),
):
    wrong(_text, _op, _direction, "inputs")(_put_back(_name, _write))
