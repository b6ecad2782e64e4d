"""The parts of the gated activations: gate and up in two tensors or packed in one, gradients, bytes and shards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.constraint import Constraint
from fusedops._contract.values import Sharding
from fusedops.constraints import Flag, Floating, Packed, SameDevice, SameShape

#: The constraints on the tensors.
TENSORS: tuple[Constraint, ...] = (
    Floating("gate"),
    Floating("up"),
    SameDevice("up", "gate"),
    SameShape("up", "gate"),
    Packed("gate", "up"),
    Flag("interleaved"),
)


def promoted(gate: Any, up: Any, *rest: Any) -> torch.dtype:
    """Return the dtype of ``gate * up``."""
    return gate.dtype if up is None else torch.promote_types(gate.dtype, up.dtype)


def split(packed: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of gate and up: the halves of the last dim, or its even and odd positions."""
    if interleaved:
        return packed[..., ::2], packed[..., 1::2]
    width = packed.shape[-1] // 2
    return packed[..., :width], packed[..., width:]


def wide_pair(gate: Tensor, up: Tensor | None, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return gate and up in the dtype of the arithmetic: float32, or float64 where one of them has it."""
    wide = torch.promote_types(promoted(gate, up), torch.float32)
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


def min_bytes(gate: Any, up: Any, *rest: Any) -> Mapping[Any, int]:
    """Read gate and up, write y; read grad, gate and up, write their gradients."""
    elements = math.prod(gate.shape) // (1 if up is not None else 2)
    inputs = math.prod(gate.shape) * (gate.dtype.itemsize + (0 if up is None else up.dtype.itemsize))
    output = elements * promoted(gate, up).itemsize
    return {"forward": inputs + output, "backward": 2 * inputs + output}


def _whole(given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the last dim where gate and up are packed in it: a part of it would hold others than the output's."""
    return (-1,) if given["up"] is None else ()


SHARDING = Sharding(whole_of=_whole)
