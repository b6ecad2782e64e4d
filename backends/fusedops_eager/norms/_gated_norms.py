"""RMSNorm beside a gate in plain torch, on any device.

torch has silu, sigmoid and their gradients as one kernel each. -inf is clamped to the least finite number: its silu is
NaN in torch. On a CPU a large tensor is processed in slabs (``_slabs.py``): only the first call of a slab reads memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype, promoted
from fusedops.ops.norms.arguments import GatedRmsNormArgs, GatedRmsNormGradArgs
from fusedops.ops.norms.formulas import in_groups
from fusedops_eager._slabs import max_slab_elements, pieces

_aten = torch.ops.aten
# With fewer elements the tensor stays in the cache anyway, and slabs would only add calls
_MIN_SLAB_ELEMENTS = 256 * 1024
# torch allocates about so many tensors of a slab's size, in the compute dtype
_FORWARD_TENSORS, _BACKWARD_TENSORS = 2, 5


def gated_rms_norm(a: GatedRmsNormArgs, save: bool) -> tuple[Tensor, Tensor | None]:
    """Compute the op on any device, for any rank and dtypes."""
    y, rstd = gated_norm_forward(*a)
    return y, rstd if save else None


def gated_rms_norm_backward(a: GatedRmsNormGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, gate and weight."""
    return gated_norm_backward(*a)


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
    wide = compute_dtype(promoted(x, gate))
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty((*x.shape[:-1], groups), dtype=wide, device=x.device)
    scale = None if weight is None else weight.to(wide) + offset
    for out, part, of_gate, root in pieces(_slab(x, wide, _FORWARD_TENSORS), y, x, gate, rstd, rows=True):
        act = _activated(_clamped(of_gate, wide), activation)
        z = torch.mul(part, act) if gate_first else part.to(wide)
        parts = in_groups(z, groups)
        torch.rsqrt(parts.square().mean(-1).add_(eps), out=root)
        normal = torch.mul(parts, root[..., None]).view(z.shape)
        if scale is not None:
            normal.mul_(scale)
        out.copy_(normal if gate_first else normal.mul_(act))
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
    wide = rstd.dtype
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs[0] else None
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if needs[1] else None
    scale = None if weight is None else weight.to(wide) + offset
    sums = None if weight is None or not needs[2] else torch.zeros(weight.shape, dtype=wide, device=x.device)
    # a sum over rows has the same bits with any number of threads
    size = _slab(x, wide, _BACKWARD_TENSORS, 2)
    for part, g, of_gate, root, dx_part, dgate_part in pieces(size, x, grad, gate, rstd, dx, dgate, rows=True):
        clamped, g, z = _clamped(of_gate, wide), g.to(wide), part.to(wide)
        act = _activated(clamped, activation)
        scaled = g if scale is None else g * scale  # the gradient of the normalized numbers, without the gate
        normal = torch.mul(in_groups(z * act if gate_first else z, groups), root[..., None]).view(z.shape)
        m = scaled if gate_first else scaled * act
        if sums is not None:
            product = normal * g if gate_first else (normal * g).mul_(act)
            sums.add_(product.sum_to_size(sums.shape))
        of_act = None if gate_first else scaled * normal
        if dx_part is not None or gate_first:
            share = in_groups(m * normal, groups).mean(-1, keepdim=True)
            dz = in_groups(m, groups) - in_groups(normal, groups) * share
            dz = dz.mul_(root[..., None]).view(z.shape)
            if dx_part is not None:
                dx_part.copy_(dz * act if gate_first else dz)
            of_act = dz.mul_(z) if gate_first else of_act
        if dgate_part is not None and of_act is not None:
            dgate_part.copy_(_gate_gradient(of_act, clamped, act, activation))
    return dx, dgate, None if sums is None or weight is None else sums.to(weight.dtype)


def _slab(x: Tensor, wide: torch.dtype, tensors: int, threads: int | None = None) -> int:
    """Return the elements of a slab; all of x off a CPU, and for a small one."""
    if not x.is_cpu or x.numel() < _MIN_SLAB_ELEMENTS:
        return x.numel()
    return max_slab_elements(x.numel(), tensors * wide.itemsize // x.element_size(), threads)


def _clamped(gate: Tensor, wide: torch.dtype) -> Tensor:
    """Return the gate in the compute dtype, -inf as the least finite number."""
    return gate.to(wide).clamp(min=torch.finfo(wide).min)


def _activated(gate: Tensor, activation: str) -> Tensor:
    """Return the activation of a gate."""
    return torch.nn.functional.silu(gate) if activation == "silu" else torch.sigmoid(gate)


def _gate_gradient(of_act: Tensor, gate: Tensor, act: Tensor, activation: str) -> Tensor:
    """Return the gradient of a gate from that of its activation. silu's is 1 at inf, where torch's is NaN."""
    if activation == "sigmoid":
        return _aten.sigmoid_backward(of_act, act)
    return _aten.silu_backward(of_act, gate.clamp(max=torch.finfo(gate.dtype).max))
