"""RMSNorm beside a gate in plain torch, on any device.

On a CPU a large tensor is processed in slabs (``_slabs.py``): only the first call of a slab reads memory. The formulas
are those of the op.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype, promoted
from fusedops.ops.norms.formulas import gated_gradients, gated_norm
from fusedops_eager._slabs import max_slab_elements, pieces

# With fewer elements the tensor stays in the cache anyway, and slabs would only add calls
_MIN_SLAB_ELEMENTS = 256 * 1024
# torch allocates about so many tensors of a slab's size, in the compute dtype
_FORWARD_TENSORS, _BACKWARD_TENSORS = 4, 8


def gated_norm_forward(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    gate_first: bool,
    activation: str,
    groups: int,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """Compute ``rms_norm(x) * act(gate)`` or ``rms_norm(x * act(gate))``.

    Args:
        x: (..., H), floating, any strides.
        gate: (..., H), floating, any strides.
        weight: (H,), floating, or None.
        eps: see the op.
        gate_first: see the op.
        activation: see the op.
        groups: see the op.
        offset: see the op.

    Returns:
        y (..., H), contiguous, of the dtype of x; rstd (..., groups), contiguous, of the compute dtype.
    """
    options = (weight, eps, gate_first, activation, groups, offset)
    if not x.is_cpu or x.numel() < _MIN_SLAB_ELEMENTS:
        y, rstd = gated_norm(x, gate, *options)
        return y.contiguous(), rstd.contiguous()
    wide = compute_dtype(promoted(x, gate))
    y = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    rstd = torch.empty((*x.shape[:-1], groups), dtype=wide, device="cpu")
    size = max_slab_elements(x.numel(), _FORWARD_TENSORS * wide.itemsize // x.element_size())
    for out, rows, of_gate, root in pieces(size, y, x, gate, rstd, rows=True):
        result, computed = gated_norm(rows, of_gate, *options)
        out.copy_(result)
        root.copy_(computed)
    return y, rstd


def gated_norm_backward(
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    gate_first: bool,
    activation: str,
    groups: int,
    offset: float,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, gate and weight, contiguous, in their dtypes; None for one that is not wanted.

    Args:
        grad: (..., H), the gradient of y, floating, any strides.
        x: as in the forward.
        gate: as in the forward.
        rstd: (..., groups), from the forward.
        weight: as in the forward.
        gate_first: see the op.
        activation: see the op.
        groups: see the op.
        offset: see the op.
        needs: the gradients to compute.
    """
    options = (gate_first, activation, groups, offset, needs)
    if not x.is_cpu or x.numel() < _MIN_SLAB_ELEMENTS:
        results = gated_gradients(grad, x, gate, rstd, weight, *options)
        return tuple(None if each is None else each.contiguous() for each in results)
    dx = torch.empty(x.shape, dtype=x.dtype, device="cpu") if needs[0] else None
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device="cpu") if needs[1] else None
    # in the compute dtype, so that the sums of slabs are not rounded
    wide = None if weight is None else weight.to(rstd.dtype)
    dweight = None if wide is None or not needs[2] else torch.zeros_like(wide)
    # a sum over rows has the same bits with any number of threads
    size = max_slab_elements(x.numel(), _BACKWARD_TENSORS * rstd.element_size() // x.element_size(), 2)
    for rows, g, of_gate, root, *parts in pieces(size, x, grad, gate, rstd, dx, dgate, rows=True):
        *computed, sums = gated_gradients(g, rows, of_gate, root, wide, *options)
        for part, result in zip(parts, computed):
            if part is not None and result is not None:
                part.copy_(result)
        if dweight is not None and sums is not None:
            dweight.add_(sums)
    return dx, dgate, None if dweight is None or weight is None else dweight.to(weight.dtype)
