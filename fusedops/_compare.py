"""The comparison of two results within an op's tolerance, in proportion to the numbers of the call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Tolerance
from fusedops._report.direction import Direction


def allowed_difference(op: Op, direction: Direction, args: Sequence[Any], result: Tensor) -> Tolerance:
    """Return the op's tolerance for the coarsest dtype in the call, in proportion to the call's numbers."""
    tensors = [arg for arg in (*args, result) if isinstance(arg, Tensor) and arg.is_floating_point()]
    table = op.tolerance if direction == "forward" else op.gradient_tolerance
    coarsest = max((table[tensor.dtype] for tensor in tensors), key=lambda tolerance: tolerance.relative)
    size = math.prod(max(1.0, abs(float(arg))) for arg in args if isinstance(arg, (int, float)))
    if direction == "forward":
        size *= max(1.0, max(map(_largest, tensors)) / 16)
    else:
        size *= _largest(args[0]) * math.sqrt(max(1.0, args[0].numel() / max(result.numel(), 1)))
    return Tolerance(coarsest.absolute * size, coarsest.relative)


def difference(
    result: Tensor, expected: Tensor, allowed: Tolerance, times: int, against: str, same_dtype: bool
) -> tuple[float, str]:
    """Compare two results.

    Args:
        result: of the kernel.
        expected: of the other computation.
        allowed: the tolerance.
        times: how many tolerances are allowed.
        against: names the other computation.
        same_dtype: True where the dtypes must be equal too.

    Returns:
        The largest difference in units of what is allowed (inf where shape or dtype differ), and its text.
    """
    for attribute in ("shape", "dtype"):
        mine, other = getattr(result, attribute, None), getattr(expected, attribute, None)
        if mine != other and (attribute == "shape" or same_dtype):
            return math.inf, f"its {attribute} is {_plain(mine)}, and {against}'s {_plain(other)}"
    if result.numel() == 0:
        return 0.0, ""
    mine, other = result.detach().cpu().double(), expected.detach().cpu().double()
    limit = times * (allowed.absolute + allowed.relative * other.abs())
    same = (mine == other) | (mine.isnan() & other.isnan())
    ratios = torch.where(same, 0.0, (mine - other).abs() / limit).nan_to_num(nan=math.inf, posinf=math.inf)
    place = tuple(int(i) for i in torch.unravel_index(ratios.argmax(), ratios.shape))
    ratio = float(ratios[place])
    text = f"element {place} is {float(mine[place]):.7g}, {against}'s {float(other[place]):.7g}"
    return ratio, f"{text}, {ratio:.3g} times the tolerance"


def _largest(tensor: Tensor) -> float:
    """Return the largest finite magnitude."""
    finite = tensor.detach().abs().nan_to_num(nan=0.0, posinf=0.0)
    return float(finite.max()) if finite.numel() else 0.0


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, torch.Size) else value
