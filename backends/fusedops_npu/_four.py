"""Tensors of any rank as the 4-D ones that the vendor's softmax takes: free, by views alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops import TensorSpec
from fusedops.constraints import Arguments, Boundary, Constraint, Reason, ReasonCode


def four(x: Tensor) -> Tensor:
    """``x`` (..., Sq, Sk) as (b, h, Sq, Sk)."""
    return _folded(x, x.dim(), max(x.dim() - 3, 1))


def four_with(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` (..., Sq, Sk) as (b, h, Sq, Sk), and a mask that :class:`Folds` takes as one that broadcasts to it."""
    at = split(x.shape, mask.shape)
    assert at is not None, "the kernel's limits let no such mask through"
    return _folded(x, x.dim(), at), _folded(mask, x.dim(), at)


def split(x: Sequence[int], mask: Sequence[int]) -> int | None:
    """After how many of x's leading dims to cut them in two, so that in each part the mask has size 1 or x's.

    Args:
        x: the shape of x, (..., Sq, Sk).
        mask: a shape that broadcasts to it.

    Returns:
        The number, for the dims of x after leading ones were added up to four in all; None where there is none.
    """
    lead = max(len(x), 4) - 2
    sizes = (*(1,) * (lead + 2 - len(x)), *x)[:lead]
    given = (*(1,) * (lead + 2 - len(mask)), *mask)[:lead]
    for at in range(1, lead):
        if all(_folds(given[part], sizes[part]) for part in (slice(at), slice(at, None))):
            return at
    return None


def _folds(given: Sequence[int], sizes: Sequence[int]) -> bool:
    return tuple(given) == tuple(sizes) or all(size == 1 for size in given)


def _folded(tensor: Tensor, rank: int, at: int) -> Tensor:
    """``tensor``, which broadcasts to one of ``rank`` dims, with the leading ones before and from ``at`` on merged."""
    if rank <= 4:
        return tensor if tensor.dim() == 4 else tensor[(None,) * (4 - tensor.dim())]
    shape = (*(1,) * (rank - tensor.dim()), *tensor.shape)
    return tensor.reshape(prod(shape[:at]), prod(shape[at:-2]), *shape[-2:])


@dataclass(frozen=True, eq=False)
class Folds(Constraint):
    """The leading dims of x can be cut in two parts, in each of which the mask has size 1, or x's sizes.

    Of up to 4 dims any can; of more, a mask that skips between dims cannot be viewed as the vendor's 4-D one.
    """

    x: str

    @property
    def code(self) -> ReasonCode:
        return ReasonCode.RANK

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.x)

    def expression(self, constants: dict[str, object]) -> str:
        constants["split"] = split
        return f"{self.x}.dim() <= 4 or split({self.x}.shape, {self.name}.shape) is not None"

    def reasons(self, args: Arguments) -> list[Reason]:
        mask, x = args[self.name], args[self.x]
        if mask is None or x.dim() <= 4 or split(x.shape, mask.shape) is not None:
            return []
        given = f"{self.name} is {tuple(mask.shape)} for {self.x} {tuple(x.shape)}"
        lead = (*x.shape[:-2], *mask.shape[-2:])
        fix = f"expand {self.name} to {lead}"
        return [Reason(self.code, f"{given}; needs {self._rule()}", given, self._rule(), fix)]

    def _rule(self) -> str:
        return f"leading dims of {self.x} in two groups, in each of which {self.name} has size 1 or {self.x}'s sizes"

    def describe(self) -> str:
        return f"{self.name}: {self._rule()}, where {self.x} has more than 4"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        x: TensorSpec = args[self.x]
        for sizes, given, taken in (
            ((2, 3), (2, 1), True),
            ((2, 3, 2), (2, 3, 1), True),
            ((2, 3, 2), (2, 1, 1), True),
            ((2, 3, 2), (2, 1, 2), False),
        ):
            grown = replace(x, shape=(*sizes, *x.shape[-2:]))
            mask: Any = TensorSpec((*given, *x.shape[-2:]), torch.bool, x.device)
            label = f"{self.name} {given} before x's last sizes, of {sizes}"
            yield Boundary(label, {**args, self.x: grown, self.name: mask}, taken)
