"""The formulas of the gated activations: gate and up in two tensors or packed in one, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype, promoted

#: The functions of a gate that multiplies a norm: silu is ``gate * sigmoid(gate)``.
ACTIVATIONS = ("silu", "sigmoid")


def output_dtype(gate: Any, up: Any, *rest: Any) -> torch.dtype:
    """Return the dtype of ``gate * up``."""
    return promoted(gate, up)


def split(packed: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of gate and up: the halves of the last dim, or its even and odd positions."""
    if interleaved:
        return packed[..., ::2], packed[..., 1::2]
    width = packed.shape[-1] // 2
    return packed[..., :width], packed[..., width:]


def wide_pair(gate: Tensor, up: Tensor | None, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return gate and up in the dtype of the arithmetic: float32, or float64 where one of them has it."""
    wide = compute_dtype(promoted(gate, up))
    first, second = split(gate, interleaved) if up is None else (gate, up)
    return first.to(wide), second.to(wide)


def gradients(
    dgate: Tensor, dup: Tensor, gate: Tensor, up: Tensor | None, interleaved: bool, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients in the form and the dtypes of the arguments, None for one that is not wanted."""
    if up is None:
        packed = torch.stack((dgate, dup), -1).flatten(-2) if interleaved else torch.cat((dgate, dup), -1)
        return (packed.to(gate.dtype) if needs[0] else None), None
    return dgate.to(gate.dtype) if needs[0] else None, dup.to(up.dtype) if needs[1] else None


def empty(gate: Tensor, up: Tensor | None, *rest: Any) -> Tensor:
    """Return an empty output."""
    dtype = promoted(gate, up)
    if up is not None:
        return torch.empty_like(gate, dtype=dtype, memory_format=torch.contiguous_format)
    return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2), dtype=dtype)


def activated(gate: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return the activation of a gate, and its derivative. silu of -inf is 0."""
    s, rest = torch.sigmoid(gate), torch.sigmoid(-gate)
    if activation == "sigmoid":
        return s, s * rest
    act = gate.masked_fill(s == 0, 0.0) * s  # -inf * 0 would be NaN
    return act, s + act.masked_fill(rest == 0, 0.0) * rest
