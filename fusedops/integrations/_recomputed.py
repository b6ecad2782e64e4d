"""The input of a layer, computed again in backward in place of being kept.

A layer that has a gradient for its weight keeps its input. The input of an MLP's last layer is the activation of two
tensors that the op keeps already: computing it again takes one pass over them, beside three products of matrices, and a
third of what an MLP keeps is not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fusedops._policy import context
from fusedops._torch import is_traced, is_transformed, storage_id, takes_saved_tensors_hooks

LEAST = 2**20  # bytes: for less the hooks below take longer than the pass


class _Again(NamedTuple):
    """A tensor that is not kept: how it is computed, by the policy of forward, and its shape."""

    compute: Callable[..., Tensor]
    block: context.Frame | None
    operands: tuple[Tensor | None, ...]
    versions: tuple[int | None, ...]
    shape: torch.Size


class _Kept(NamedTuple):
    """A tensor that is kept, with its version, which autograd leaves to the hooks."""

    tensor: Tensor
    version: int


def call_without_keeping(
    layer: Callable[[Tensor], Any], compute: Callable[..., Tensor], *operands: Tensor | None
) -> Any:
    """Return ``layer(compute(*operands))``, where backward computes the layer's input again if it needs it.

    The input is kept as ever where it is small, where other hooks take the saved tensors, such as those of gradient
    checkpointing, and where torch traces or transforms the call.

    Args:
        layer: a function of one tensor.
        compute: gives the same bits each time, and keeps the operands for its own gradient.
        operands: its arguments.
    """
    h = compute(*operands)
    if not h.requires_grad or is_traced() or h.numel() * h.itemsize < LEAST or is_transformed():
        return layer(h)
    if not takes_saved_tensors_hooks():
        return layer(h)
    memory, size, version, block = storage_id(h), h.numel(), h._version, context.frame.get()
    kept = tuple(None if each is None else each.detach() for each in operands)

    def pack(saved: Tensor) -> Any:
        is_whole = storage_id(saved) == memory and saved.numel() == size and saved.is_contiguous()
        if not is_whole or saved._version != version:  # another tensor, or a hook of the layer's has written to h
            return _Kept(saved, saved._version)
        return _Again(compute, block, kept, _versions(kept), saved.shape)

    with saved_tensors_hooks(pack, _unpacked):
        return layer(h)


def _unpacked(packed: _Again | _Kept) -> Tensor:
    if isinstance(packed, _Kept):
        if packed.tensor._version != packed.version:
            raise RuntimeError(
                "got a tensor that an MLP's last layer keeps, such as its weight, modified by an inplace operation "
                "after forward, expected it as in forward until backward has run; to fix: modify it after backward"
            )
        return packed.tensor
    if _versions(packed.operands) != packed.versions:
        raise RuntimeError(
            "got the gate or up of an MLP modified in place after forward, expected both as in forward until backward "
            "has run; to fix: modify a copy"
        )
    with torch.no_grad(), context.within(packed.block):
        return packed.compute(*packed.operands).view(packed.shape)


def _versions(operands: tuple[Tensor | None, ...]) -> tuple[int | None, ...]:
    return tuple(None if each is None else each._version for each in operands)
