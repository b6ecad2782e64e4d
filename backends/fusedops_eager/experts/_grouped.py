"""grouped_matmul in plain torch: the products of each group on its own rows alone.

On a CPU the ends of the groups are read once, and each group with rows is one product. On CUDA torch's grouped_mm has
the 16-bit products of all groups, and nothing is read: it leaves the rows past the last end, and the gradients of
groups without rows, uninitialised, and they are set to 0 here. Elsewhere the ends are read from the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusedops.dtypes import arithmetic, no_autocast
from fusedops.ops.experts.arguments import ends_of
from fusedops.ops.experts.formulas import valid_ends
from fusedops_eager.experts._experts import oriented, product_dtype, write_gradients, write_product

_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None)  # since torch 2.10


def forward(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return the products of all groups, (S, N)."""
    with no_autocast(x.device.type):
        if takes(x, weight):
            return forward_at_once(x, weight, offsets, bias, transposed)
        wide = arithmetic(x, weight)
        of = product_dtype(x, weight, wide)
        ends = ends_of("grouped_matmul", offsets, x.shape[0])
        y = x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])
        for e, rows in _groups(ends):
            if rows.start == rows.stop:
                continue
            one, other, out = x[rows].to(of), oriented(weight[e], of, transposed), y[rows]
            if bias is None:
                write_product(one, other, out)
                continue
            total = out if out.dtype is wide else torch.empty_like(out, dtype=wide)
            write_product(one, other, total)
            total += bias[e].to(wide)
            if total is not out:
                out.copy_(total)
        y[_last(ends) :] = 0.0
        return y


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    transposed: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight and bias, each where it is wanted."""
    with no_autocast(x.device.type):
        if takes(x, weight, grad):
            return backward_at_once(grad, x, weight, offsets, bias, transposed, needs)
        wide = arithmetic(x, weight)
        of = product_dtype(x, weight, wide)
        ends = ends_of("grouped_matmul", offsets, x.shape[0])
        dx = x.new_empty(x.shape) if needs[0] else None
        of_weight, of_bias = (
            None if t is None or not need else torch.empty_like(t, memory_format=torch.contiguous_format)
            for t, need in zip((weight, bias), needs[1:])
        )
        for e, rows in _groups(ends):
            if rows.start == rows.stop:
                for gradient in (of_weight, of_bias):
                    if gradient is not None:
                        gradient[e] = 0.0
                continue
            g = grad[rows].to(wide)
            if dx is not None:
                write_product(g.to(of), oriented(weight[e], of, not transposed), dx[rows])
            write_gradients(of_weight, of_bias, [(e, slice(None))], g, x[rows], of, transposed)
        if dx is not None:
            dx[_last(ends) :] = 0.0
        return dx, of_weight, of_bias


def _groups(ends: list[int]) -> Iterator[tuple[int, slice]]:
    """Yield each group and its rows."""
    start = 0
    for e, end in enumerate(ends):
        yield e, slice(start, end)
        start = end


def _last(ends: list[int]) -> int:
    """Return the number of rows that have a group."""
    return ends[-1] if ends else 0


# ----------------------------------------------------------------------------------------------- all groups at once


def takes(x: Tensor, weight: Tensor, grad: Tensor | None = None) -> bool:
    """Return True where torch's grouped_mm has these products in one kernel.

    Its products of other dtypes, of older devices and of ROCm are loops, which read the ends from the device.
    """
    return (
        _grouped_mm is not None
        and x.is_cuda
        and torch.version.hip is None
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
        and are_aligned(x, weight, *([] if grad is None else [grad]))
    )


def are_aligned(x: Tensor, *others: Tensor) -> bool:
    """Return True for tensors of bfloat16 with elements, whose rows start at multiples of 16 bytes, as grouped_mm asks.

    A tensor that is not contiguous is copied.
    """
    return all(
        each.dtype is torch.bfloat16
        and each.numel() > 0
        and all(size % 8 == 0 for size in each.shape[-2 if each.dim() == 3 else -1 :])
        and (not each.is_contiguous() or each.data_ptr() % 16 == 0)
        for each in (x, *others)
    )


def forward_at_once(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return the products of all groups. The device is not waited for."""
    ends = valid_ends(offsets, x.shape[0])
    y = _products(x, weight if transposed else weight.mT, ends)
    group = _group_of_rows(ends, x.shape[0])
    if bias is not None:  # of any row for those past the last end
        y = (y + bias[group.clamp(max=bias.shape[0] - 1)]).to(x.dtype)
    return y.masked_fill_((group == weight.shape[0])[:, None], 0.0)


def backward_at_once(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    transposed: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Return the gradients, each where it is wanted. The device is not waited for."""
    ends = valid_ends(offsets, x.shape[0])
    starts = torch.cat((ends.new_zeros(1), ends))
    dx = of_weight = of_bias = None
    if needs[0]:
        tail = (torch.arange(x.shape[0], device=x.device) >= ends[-1])[:, None]
        dx = _products(grad, weight.mT if transposed else weight, ends).masked_fill_(tail, 0.0)
    if needs[1]:
        one, other = (x, grad) if transposed else (grad, x)
        of_weight = _products(one.contiguous().t(), other, ends)
        of_weight = of_weight.masked_fill_((ends == starts[:-1])[:, None, None], 0.0)
    if needs[2] and bias is not None:
        sums: Any = torch.segment_reduce  # whose stub lacks arguments
        of_bias = sums(grad.float(), "sum", offsets=starts, axis=0, initial=0, unsafe=True).to(bias.dtype)
    return dx, of_weight, of_bias


def _products(one: Tensor, other: Tensor, ends: Tensor) -> Tensor:
    """Return grouped_mm of tensors that are contiguous, or the transposes of such tensors."""
    first, second = (
        each if each.is_contiguous() or each.mT.is_contiguous() else each.contiguous() for each in (one, other)
    )
    return _grouped_mm(first, second, offs=ends.int())


def _group_of_rows(ends: Tensor, rows: int) -> Tensor:
    """Return the group of each row, and E past the last end, in less memory than the reference."""
    return torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True)
