"""The mask of packed sequences, which is made only where something reads it.

transformers makes a boolean mask (B, 1, S, S) where ``position_ids`` restart and there is neither a padding mask nor a
cache. :func:`fusedops.varlen_attention` needs the bounds of the sequences alone. The mask made here is a tensor with
these bounds: the attention implementation "fusedops" reads them, and any function of torch that gets it, that of a
model that changes its masks too, gets the boolean mask that transformers makes.

Source: transformers, ``masking_utils.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import masking_utils

from fusedops._torch import tree_map_only, without_torch_function, wrapper_subclass

_causal: Any = masking_utils.causal_mask_function
# one function of each kind, to compare others' code with
_AND, _WINDOW, _PACKED = (
    masking_utils.and_masks(_causal).__code__,
    masking_utils.sliding_window_overlay(1).__code__,
    masking_utils.packed_sequence_mask_function(torch.zeros(1, 1, device="cpu")).__code__,
)


class Sequences(NamedTuple):
    """The sequences that a mask keeps apart.

    Attributes:
        bounds: (B + 1,), int64, the first token of each sequence in the flat batch, and the number of tokens.
        window: ``(left, 0)``, or None.
    """

    bounds: Tensor
    window: tuple[int, int] | None


class PackedMask(Tensor):
    """A boolean mask (B, 1, S, S), True where a token sees another; made where a function of torch first reads it.

    ``sequences`` is None once a function has written into it.
    """

    sequences: Sequences | None
    _make: Callable[[], Tensor]
    _boolean: Tensor | None

    @staticmethod
    def __new__(
        cls: type[PackedMask], sequences: Sequences, shape: tuple[int, ...], make: Callable[[], Tensor]
    ) -> PackedMask:
        """Return the mask of these sequences; ``make`` makes the boolean one."""
        mask = cast("PackedMask", wrapper_subclass(cls, shape, torch.bool, sequences.bounds.device))
        mask.sequences = sequences
        mask._make = make
        mask._boolean = None
        return mask

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the shape and the sequences."""
        return f"PackedMask(shape={tuple(self.shape)}, {self.sequences})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def made(mask: PackedMask) -> Tensor:
            if mask._boolean is None:
                mask._boolean = mask._make()
            if func._schema.is_mutable:
                mask.sequences = None
            return mask._boolean

        args, kwargs = tree_map_only(PackedMask, made, (args, kwargs or {}))
        return func(*args, **kwargs)


def packed_or_boolean_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return what ``transformers.masking_utils.sdpa_mask`` returns; for packed sequences alone as a PackedMask.

    transformers passes each argument by name.
    """

    def make() -> Any:
        return masking_utils.sdpa_mask(*args, **kwargs)

    function, length = kwargs.get("mask_function"), kwargs.get("q_length")
    if getattr(function, "__code__", None) is not _AND or torch.compiler.is_compiling():
        return make()
    square = length == kwargs.get("kv_length") and not (kwargs.get("q_offset") or kwargs.get("kv_offset"))
    if not square or kwargs.get("attention_mask") is not None or kwargs.get("use_vmap"):
        return make()
    numbers, window = _sequences_of(function)
    if numbers is None or numbers.shape != (kwargs.get("batch_size"), length):
        return make()
    first = torch.ones_like(numbers[:, :1], dtype=torch.bool)
    starts = torch.cat((first, numbers[:, 1:] != numbers[:, :-1]), 1).flatten().nonzero().flatten()
    bounds = torch.nn.functional.pad(starts, (0, 1), value=numbers.numel())
    shape = len(numbers), 1, *numbers.shape[1:] * 2
    return PackedMask(Sequences(bounds, None if window is None else (window - 1, 0)), shape, make)


def _sequences_of(function: Any) -> tuple[Tensor | None, int | None]:
    """Return the number of each token's sequence, (B, S), and the window, of causal attention within packed sequences.

    The numbers are None for another mask function.
    """
    numbers, window, causal = None, None, False
    for part in _parts(function):
        code, closed = getattr(part, "__code__", None), inspect.getclosurevars(part).nonlocals
        if part is _causal:
            causal = True
        elif code is _PACKED and numbers is None:
            numbers = closed.get("packed_sequence_mask")
        elif code is _WINDOW and window is None:
            window = closed.get("sliding_window")
        else:
            return None, None
    return (numbers, window) if causal else (None, None)


def _parts(function: Any) -> Iterator[Any]:
    """Yield the functions all of which must be True."""
    if getattr(function, "__code__", None) is _AND:
        for part in inspect.getclosurevars(function).nonlocals["mask_functions"]:
            yield from _parts(part)
    else:
        yield function
