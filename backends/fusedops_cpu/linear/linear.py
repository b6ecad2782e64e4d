"""linear in the compiled library (``src/dot/linear.cpp``, ``linear_product.cpp``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusedops import ops
from fusedops.constraints import Arguments, Boundary, Constraint, Dim, DType, Reason, ReasonCode, constant
from fusedops.ops.linear.linear import act_of
from fusedops_cpu.launch.calls import library_kernel, results_of
from fusedops_cpu.launch.library import ACTIVATION_CODES, dense, library
from fusedops_cpu.launch.struct_call import LibraryCall, LibraryFunction
from fusedops_cpu.linear.products import multiply

_NO_ACTIVATION = -1


class _SlowInTorch(Constraint):
    """torch multiplies float32 by MKL, and the processor is AMD's, on which that takes longer.

    A spec with a capability is one of another processor.
    """

    code = ReasonCode.CAPABILITY

    def expression(self, constants: dict[str, object]) -> str:
        return f"{constant(constants, _is_slow_in_torch)}({self.name})"

    def reasons(self, args: Arguments) -> list[Reason]:
        if _is_slow_in_torch(args[self.name]):
            return []
        return [Reason(self.code, "this processor", self.describe(), "leave the call to torch, which is as fast here")]

    def describe(self) -> str:
        return "an AMD processor, and torch with MKL"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        if _is_slow_in_torch(args[self.name]):
            yield Boundary(self.describe(), args, True)
        another = args[self.name].replace(capability=(0, 0))
        yield Boundary("another processor", {**args, self.name: another}, False)


def _is_slow_in_torch(tensor: Any) -> bool:
    return getattr(tensor, "capability", None) is None and library().is_ahead_of_mkl


# with smaller weights, torch's products may take 0.6 of the time
_FOR_SPEED = (_SlowInTorch("weight"), Dim("weight", (0, 1), at_least=256))


def _float32(*names: str) -> list[DType]:
    return [DType(name, torch.float32) for name in names]


def linear_by_lanes(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> LibraryCall:
    """Compute the op; the weight is read where it lies. A row has the same bits whatever the other rows are."""
    return _forward(library().linear_forward, x, weight, bias, activation)


@library_kernel(
    ops.linear,
    *_float32("x", "weight", "bias"),
    source="fusedops_cpu/src/dot/linear.cpp",
    for_speed=_FOR_SPEED,
    rows_independent=True,
    for_rows=linear_by_lanes,
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> LibraryCall:
    """Compute the op; the terms of many rows are added in their order."""
    return _forward(library().linear_in_order, x, weight, bias, activation)


def _forward(
    function: LibraryFunction, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> LibraryCall:
    x = dense(x)
    weight = weight if weight.stride(1) == 1 and not weight.is_neg() else dense(weight)
    bias = bias if bias is None else dense(bias)
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    sizes = (x.shape[:-1].numel(), *weight.shape, weight.stride(0))
    code = _NO_ACTIVATION if activation is None else ACTIVATION_CODES[activation]
    return LibraryCall(function, (x, weight, bias, y, *sizes, code), y)


@library_kernel(
    ops.linear,
    *_float32("grad", "x", "weight", "bias"),
    direction="backward",
    source="fusedops_cpu/src/dot/linear_product.cpp",
    for_speed=_FOR_SPEED,
    rows_independent=True,
)
def linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients by the library's products; sums in one order for any number of threads."""
    grad, x = dense(grad), dense(x)
    if weight.is_neg() or 1 not in weight.stride():
        weight = dense(weight)
    if activation is not None:
        u = results_of(linear_by_lanes(x, weight, bias, None))
        grad = act_of(activation).gradient(grad, u)
    rows = x.shape[:-1].numel()
    g, flat = grad.reshape(rows, weight.shape[0]), x.reshape(rows, weight.shape[1])
    dx = dweight = None
    if needs[0]:
        dx = torch.empty_like(flat)
        multiply(g, weight.t(), dx, in_bfloat16=False)
    if needs[1]:
        dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
        multiply(g.t(), flat.t(), dweight, in_bfloat16=False)
    return None if dx is None else dx.view(x.shape), dweight, g.sum(0) if needs[2] and bias is not None else None
