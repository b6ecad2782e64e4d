"""Helpers for the gated activations: gate and up as two views, in the compute dtype, slab by slab."""

from __future__ import annotations

import torch
from torch import Tensor

# With fewer elements, a few torch calls on the whole tensors are faster: see _gelu.py, where it was measured.
MIN_SLAB_ELEMENTS = 256 * 1024


def views(gate: Tensor, up: Tensor | None, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return gate and up, which are parts of ``gate`` if ``up`` is None. Nothing is copied."""
    if up is not None:
        return gate, up
    if interleaved:
        return gate[..., ::2], gate[..., 1::2]
    width = gate.shape[-1] // 2
    return gate[..., :width], gate[..., width:]


def empty_gradients(
    gate: Tensor, up: Tensor | None, interleaved: bool, needs: tuple[bool, ...]
) -> tuple[tuple[Tensor | None, Tensor | None], tuple[Tensor | None, Tensor | None]]:
    """Allocate the wanted gradients. Return them, and where the gradients of gate and of up are written."""
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format) if needs[0] else None
    if up is None:
        return (dgate, None), ((None, None) if dgate is None else views(dgate, None, interleaved))
    dup = torch.empty_like(up, memory_format=torch.contiguous_format) if needs[1] else None
    return (dgate, dup), (dgate, dup)


def widened(part: Tensor, buffer: Tensor) -> Tensor:
    """Return ``part`` in the dtype of ``buffer``: itself where it has that dtype, else the buffer with its values."""
    return part if part.dtype is buffer.dtype else buffer.copy_(part)


def shifted(up: Tensor, offset: float, limit: float | None, buffer: Tensor) -> Tensor:
    """Return the clamped up plus the offset: up itself where that is the same, else the buffer."""
    if limit is None and not offset:
        return up
    result = buffer.copy_(up) if up.dtype is not buffer.dtype else up
    if limit is not None:
        result = torch.clamp(result, -limit, limit, out=buffer)
    return torch.add(result, offset, out=buffer) if offset else result
