"""Views of tensors of any rank as 4-D tensors, the only rank that the vendor's softmax supports. Nothing is copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops import TensorSpec
from fusedops.constraints import Arguments, Beside, Boundary, ReasonCode, constant


def as_4d(x: Tensor) -> Tensor:
    """View ``x`` (..., Sq, Sk) as (b, h, Sq, Sk)."""
    return _merge_leading(x, x.dim(), max(x.dim() - 3, 1))


def as_4d_with_mask(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """View ``x`` (..., Sq, Sk) as (b, h, Sq, Sk), and the mask as a 4-D tensor that broadcasts to it.

    The mask must satisfy :class:`ViewableAs4D`.
    """
    split = split_point(x.shape, mask.shape)
    assert split is not None, "the kernel's constraints refuse such a mask"
    return _merge_leading(x, x.dim(), split), _merge_leading(mask, x.dim(), split)


def split_point(x: Sequence[int], mask: Sequence[int]) -> int | None:
    """Return where to split the leading dims of x into two groups, so that each group can be merged into one dim.

    A group can be merged if the mask has size 1 in all its dims, or the sizes of x in all of them.

    Args:
        x: the shape of x, (..., Sq, Sk).
        mask: a shape that broadcasts to it.

    Returns:
        The number of dims in the first group, after x was extended with leading 1s to at least four dims; None if no
        split is possible.
    """
    lead = max(len(x), 4) - 2
    x_sizes = (*(1,) * (lead + 2 - len(x)), *x)[:lead]
    mask_sizes = (*(1,) * (lead + 2 - len(mask)), *mask)[:lead]
    splits = (
        split
        for split in range(1, lead)
        if _can_merge(mask_sizes[:split], x_sizes[:split]) and _can_merge(mask_sizes[split:], x_sizes[split:])
    )
    return next(splits, None)


def _can_merge(mask_sizes: Sequence[int], x_sizes: Sequence[int]) -> bool:
    return tuple(mask_sizes) == tuple(x_sizes) or all(size == 1 for size in mask_sizes)


def _merge_leading(tensor: Tensor, rank: int, split: int) -> Tensor:
    """View a tensor that broadcasts to ``rank`` dims as 4-D: merge the dims before ``split``, and those up to Sq."""
    if rank <= 4:
        return tensor if tensor.dim() == 4 else tensor[(None,) * (4 - tensor.dim())]
    shape = (*(1,) * (rank - tensor.dim()), *tensor.shape)
    return tensor.reshape(prod(shape[:split]), prod(shape[split:-2]), *shape[-2:])


class ViewableAs4D(Beside):
    """The leading dims of x can be split into two groups, in each of which the mask has size 1 or the sizes of x.

    This always holds for up to 4 dims. With more dims, a mask that alternates between size 1 and x's size has no 4-D
    view.
    """

    code = ReasonCode.RANK

    def expression(self, constants: dict[str, object]) -> str:
        split = f"{constant(constants, split_point)}({self.other}.shape, {self.name}.shape)"
        return f"{self.other}.dim() <= 4 or {split} is not None"

    def accepts(self, mask: Any, x: Any) -> bool:
        return x.dim() <= 4 or split_point(x.shape, mask.shape) is not None

    def rule(self) -> str:
        return f"{self._groups()}, where {self.other} has more than 4"

    def given(self, mask: Any, x: Any) -> str:
        return f"{self.name} of shape {tuple(mask.shape)} for {self.other} of {tuple(x.shape)}"

    def needed(self, mask: Any, x: Any) -> str:
        return self._groups()

    def fix_of(self, mask: Any, x: Any) -> str:
        return f"expand {self.name} to {(*x.shape[:-2], *mask.shape[-2:])}"

    def _groups(self) -> str:
        x = self.other
        return f"leading dims of {x} in two groups, in each of which {self.name} has size 1 or {x}'s sizes"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        x: TensorSpec = args[self.other]
        for x_sizes, mask_sizes, accepted in (
            ((2, 3), (2, 1), True),
            ((2, 3, 2), (2, 3, 1), True),
            ((2, 3, 2), (2, 1, 1), True),
            ((2, 3, 2), (2, 1, 2), False),
        ):
            reshaped = x.replace(shape=(*x_sizes, *x.shape[-2:]))
            mask: Any = TensorSpec((*mask_sizes, *x.shape[-2:]), torch.bool, x.device)
            label = f"leading sizes {mask_sizes} of {self.name} for {x_sizes} of {self.other}"
            yield Boundary(label, {**args, self.other: reshaped, self.name: mask}, accepted)
