"""The mask of packed sequences, which is made only where something reads it.

transformers makes a boolean mask (B, 1, S, S) where ``position_ids`` restart and there is neither a padding mask nor a
cache. :func:`fusedops.varlen_attention` needs the bounds of the sequences alone. The mask made here is a tensor with
these bounds: the attention implementation "fusedops" reads them, and any function of torch that gets it, that of a
model that changes its masks too, gets the boolean mask that transformers makes.

Source: transformers, ``masking_utils.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import masking_utils

from fusedops._torch import (
    dispatch_modes,
    is_traced,
    is_transformed,
    tree_map_only,
    without_torch_function,
    wrapper_subclass,
)
from fusedops.integrations._trial.twin import called

_NUMBERS, _POSITIONS, _WINDOW = "numbers", "positions", "window"


class Sequences(NamedTuple):
    """The sequences that a mask keeps apart.

    Attributes:
        bounds: (B + 1,), int64, the first token of each sequence in the flat batch, and the number of tokens.
        window: ``(left, 0)``, or None.
        causal: False where a token sees the tokens after it too; a window is then that of the attention's module.
    """

    bounds: Tensor
    window: tuple[int, int] | None = None
    causal: bool = True


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
        mask = cast("PackedMask", wrapper_subclass(cls, torch.bool, sequences.bounds.device, shape))
        mask.sequences = sequences
        mask._make = make
        mask._boolean = None
        return mask

    @property
    def is_unread(self) -> bool:
        """True where no function of torch has read it: it takes no memory."""
        return self._boolean is None

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

    config, length = kwargs.get("config"), kwargs.get("q_length")
    if isinstance(config, _Trial):
        config.function = kwargs["mask_function"]
        return None
    if config is None or is_traced() or dispatch_modes() or is_transformed():
        return make()
    square = length == kwargs.get("kv_length") and not (kwargs.get("q_offset") or kwargs.get("kv_offset"))
    if not square or kwargs.get("attention_mask") is not None or kwargs.get("use_vmap"):
        return make()
    numbers, window = _sequences_of(kwargs["mask_function"], config._attn_implementation)
    if numbers is None or numbers.shape != (kwargs.get("batch_size"), length):
        return make()
    first = torch.ones_like(numbers[:, :1], dtype=torch.bool)
    starts = torch.cat((first, numbers[:, 1:] != numbers[:, :-1]), 1).flatten().nonzero().flatten()
    bounds = torch.nn.functional.pad(starts, (0, 1), value=numbers.numel())
    shape = len(numbers), 1, *numbers.shape[1:] * 2
    return PackedMask(Sequences(bounds, None if window is None else (window - 1, 0)), shape, make)


def _sequences_of(function: Any, implementation: str) -> tuple[Tensor | None, int | None]:
    """Return the number of each token's sequence, (B, S), and the window, of causal attention within packed sequences.

    The numbers are None for another mask function.
    """
    parts = [*_parts(function)]
    for form in _forms(implementation):
        if len(parts) != len(form):
            continue
        values = {like: part for part, like in zip(parts, form) if isinstance(like, str)}
        if all(isinstance(like, str) or _is_same(like, part) for part, like in zip(parts, form)):
            return values[_NUMBERS], values.get(_WINDOW)
    return None, None


def _parts(function: Any) -> Iterator[Any]:
    """Yield the code of a mask function, then the values that it closes over; of a function in its place, its parts."""
    if not isinstance(function, FunctionType):
        yield function
        return
    yield function.__code__
    for cell in function.__closure__ or ():
        values: Any = cell.cell_contents
        if isinstance(values, tuple):
            yield len(cast("tuple[Any, ...]", values))
        for value in cast("tuple[Any, ...]", values if isinstance(values, tuple) else (values,)):
            yield from _parts(value)


class _Trial:
    """A config for transformers' functions that make masks. It gets the mask function, in place of a mask."""

    def __init__(self, implementation: str, window: int | None) -> None:
        self._attn_implementation = implementation
        self.sliding_window = window
        self.function: Any = None


@cache
def _forms(implementation: str) -> list[list[Any]]:
    """Return the parts of the functions that transformers makes for packed sequences, without and with a window.

    They are those of a trial, with names in place of its values, where the mask is that of causal attention within the
    sequences. transformers computes the numbers of the sequences from the positions.
    """
    size, window = 8, 5
    index = torch.arange(size, device="cpu")
    positions = torch.where(index < 7, index, index - 7)[None]
    numbers = (index >= 7).long()[None]
    distance, same = index[:, None] - index, numbers.mT == numbers
    makers: Any = (masking_utils.create_causal_mask, None), (masking_utils.create_sliding_window_causal_mask, window)
    forms: list[list[Any]] = []
    for make, width in makers:
        trial = _Trial(implementation, width)
        called(make, trial, torch.zeros(1, size, 1, device="cpu"), None, None, positions)
        mask = called(trial.function, 0, 0, index[:, None], index)
        expected = same & (distance >= 0) & (distance < (width or size))
        values = {_NUMBERS: numbers, _POSITIONS: positions, _WINDOW: width}
        form = [
            next((name for name, value in values.items() if _is_same(value, part)), part)
            for part in _parts(trial.function)
        ]
        is_known = any(part is _NUMBERS for part in form) and not any(isinstance(part, Tensor) for part in form)
        if is_known and isinstance(mask, Tensor) and torch.equal(mask, expected):
            forms.append(form)
    return forms


def _is_same(value: Any, part: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(part, Tensor):
        return torch.equal(value, part)
    return type(value) is type(part) and value == part
