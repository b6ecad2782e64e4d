"""The comparison of a result with an expected one: element by element, each within a limit by the op's error bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fusedops._contract.evidence import Tolerance
from fusedops._contract.kernel import Kernel
from fusedops._contract.op import Op
from fusedops._contract.signature import spread
from fusedops._report.direction import Direction
from fusedops.dtypes import CODES, compute_dtype
from fusedops.errors import PluginError

_TYPICAL = 16  # without an error bound: arguments up to this size are what the tolerances hold for


class Difference(NamedTuple):
    """The differences of one result from the expected one.

    Attributes:
        ratio: the largest, in units of the limit of its element; inf where that is 0 or one of the two is not finite.
        beyond: elements beyond their limits.
        element: the index of the largest.
        result: the result there.
        expected: the expected number there.
        limit: the largest accepted difference there.
    """

    ratio: float
    beyond: int = 0
    element: tuple[int, ...] = ()
    result: float = 0.0
    expected: float = 0.0
    limit: float = 0.0


def with_choice(op: Op, args: Sequence[Any], outputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of the call that outputs are compared with, see ``pin_choice`` of :class:`Evidence`.

    Args:
        op: the op.
        args: of forward.
        outputs: of the kernel, of the right shapes.
    """
    pin = op.evidence.pin_choice
    if pin is None:
        return tuple(args)
    on_cpu = [[each.detach().cpu() if isinstance(each, Tensor) else each for each in some] for some in (args, outputs)]
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    # what the op did not change stays the same tensor
    pinned = zip(args, on_cpu[0], pin(*on_cpu))
    return tuple(
        own if new is copy else new.to(device) if isinstance(new, Tensor) else new for own, copy, new in pinned
    )


def limits(
    op: Op,
    direction: Direction,
    args: Sequence[Any],
    expected: Sequence[Any],
    dtypes: Sequence[Any],
    kernels: Sequence[Kernel] = (),
    rounded: bool = False,
) -> list[Tensor | None]:
    """Return the largest accepted difference of each element: ``relative * |expected|`` and the error bound's.

    Twice that for two rounded results. What the kernels' own arithmetic adds comes on top.

    Args:
        op: the op.
        direction: forward or backward.
        args: the arguments of that direction, as a kernel gets them.
        expected: outputs then saved values, or gradients, in the order of a kernel's results; None for one left out.
        dtypes: of the results, in the same order.
        kernels: that have computed one of the two results.
        rounded: True where ``expected`` is of these dtypes too, not float64: a 0 in it may be a small number.

    Returns:
        For each of ``expected`` a float64 tensor on the CPU of its shape, or None.

    Raises:
        PluginError: the op accepts a dtype for which it has no tolerance.
    """
    table = op.evidence.tolerance if direction == "forward" else op.evidence.gradient_tolerance
    bound_of = op.evidence.error_bound if direction == "forward" else op.evidence.gradient_error_bound
    given = tuple(arg.detach().cpu() if isinstance(arg, Tensor) else arg for arg in args)
    args_dtypes = [arg.dtype for arg in given if isinstance(arg, Tensor) and arg.dtype in table]
    by_absolute: dict[float, tuple[Any, ...]] = {}
    accepted: list[Tensor | None] = []
    for index, (want, dtype) in enumerate(zip(expected, dtypes)):
        if want is None or not dtype.is_floating_point or dtype in CODES:
            accepted.append(None if want is None else torch.zeros(want.shape, dtype=torch.float64))
            continue
        known = [*args_dtypes, *([dtype] if dtype in table else [])]
        if not known:
            attribute = "tolerance" if direction == "forward" else "gradient_tolerance"
            raise PluginError(
                f"{op.name}: got no {attribute} for {dtype}, expected one for each dtype that the op accepts; to fix: "
                f"add it to the op's {attribute}, or accept fewer dtypes"
            )
        allowed = max((table[each] for each in known), key=lambda each: each.relative)
        if bound_of is not None and dtype in table:
            allowed = table[dtype]
            if allowed.absolute not in by_absolute:
                result = bound_of(allowed.absolute, *given)
                by_absolute[allowed.absolute] = (
                    cast("tuple[Any, ...]", result) if isinstance(result, tuple) else (result,)
                )
        wide = want.detach().cpu().double()
        bounds = by_absolute.get(allowed.absolute, ())
        if index < len(bounds) and bounds[index] is not None:
            error = bounds[index].double()
        else:
            error = allowed.absolute * _usual_size(op, direction, given, wide)
        limit = _with_rounding(wide, error, allowed.relative, dtype, rounded)
        accepted.append(2 * limit if rounded else limit)
    for kernel in kernels:
        more: Sequence[Any] = () if kernel.extra_error is None else spread(kernel.extra_error)(*given)
        for index, (limit, error) in enumerate(zip(accepted, more)):
            if limit is not None and error is not None:
                accepted[index] = (limit + error).nan_to_num(nan=math.inf, posinf=math.inf)
    return accepted


def is_rounding(op: Op, direction: Direction, result: Tensor, expected: Tensor) -> bool:
    """Return True where a result is off by no more than the relative part of its tolerance: within any limit."""
    table = op.evidence.tolerance if direction == "forward" else op.evidence.gradient_tolerance
    tolerance = table.get(result.dtype)
    if tolerance is None or result.shape != expected.shape:
        return False
    error = (result.detach().cpu().double() - expected).abs_()
    return bool((error <= tolerance.relative * expected.abs()).all())


def within(tolerance: Tolerance, expected: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the limits by a tolerance alone, for numbers of about 1."""
    wide = expected.detach().cpu().double()
    return _with_rounding(wide, torch.tensor(tolerance.absolute), tolerance.relative, dtype)


def _with_rounding(
    expected: Tensor, error: Tensor, relative: float, dtype: torch.dtype, rounded: bool = False
) -> Tensor:
    """Return ``error`` with the rounding of the result to ``dtype``."""
    size = expected.abs().nan_to_num(nan=0.0, posinf=0.0)
    if dtype.is_floating_point:
        # below the smallest normal number of the arithmetic a device may return 0
        arithmetic = torch.finfo(compute_dtype(dtype))
        may_underflow = rounded or dtype == torch.float64  # the expected 0 has the precision of the result
        least = max(arithmetic.smallest_normal, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
        size = torch.where((size > 0) | may_underflow, relative * size + least, 0.0)
    return size + error.nan_to_num(nan=0.0, posinf=math.inf)


def difference(result: Tensor, expected: Tensor, limit: Tensor) -> Difference:
    """Compare two tensors of one shape, see :func:`ratios`.

    Args:
        result: of the kernel.
        expected: of the other computation.
        limit: from :func:`limits`.
    """
    if result.numel() == 0:
        return Difference(0.0)
    result, expected = result.detach(), expected.detach()
    each = ratios(result, expected, limit)
    element = _element(int(each.argmax()), each.shape)
    at = float(limit.expand(each.shape)[element])
    return Difference(
        float(each[element]), int((each > 1).sum()), element, float(result[element]), float(expected[element]), at
    )


def _element(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the element of that number in a contiguous tensor. torch.unravel_index takes milliseconds."""
    index: list[int] = []
    for size in reversed(shape):
        number, at = divmod(number, size)
        index.insert(0, at)
    return tuple(index)


def ratios(result: Tensor, expected: Tensor, limit: Tensor) -> Tensor:
    """Return the difference of each element in units of its limit, inf where a number is not finite.

    NaN equals NaN. Where the limit is inf, as the arithmetic may overflow, any number is accepted. Infinity is accepted
    for a number that rounds to it, within the limit.
    """
    got, want = result.detach().cpu().double(), expected.detach().cpu().double()
    same = (got == want) | (got.isnan() & want.isnan()) | (limit == math.inf)
    if result.dtype.is_floating_point:
        largest = torch.finfo(result.dtype).max
        same |= got.isinf() & (want * got.sign() + limit >= largest)
        same |= want.isinf() & (got * want.sign() + limit >= largest)
    return torch.where(same, 0.0, (got - want).abs() / limit).nan_to_num(nan=math.inf, posinf=math.inf)


def _usual_size(op: Op, direction: Direction, args: Sequence[Any], expected: Tensor) -> Tensor:
    """Return the error bound of an op that has none of its own: the largest number of each row.

    Of an output, at least 1, and a sixteenth of the arguments in the row. Of a gradient, also the gradients of the
    outputs in the row, added up where the result is a sum over rows.
    """
    size = _row_size(expected)
    if direction == "forward":
        size = size.clamp(min=1.0)
        for arg in args:
            if isinstance(arg, Tensor) and arg.is_floating_point():
                size = torch.maximum(size, _over_rows(_row_size(arg), expected) / _TYPICAL)
        return size
    for grad in args[: len(op.backward_call.grads)]:
        terms = grad.double().abs().nan_to_num(nan=0.0, posinf=0.0)
        try:
            terms = terms.sum_to_size(expected.shape)
        except RuntimeError:  # neither of its shape nor a sum over it
            terms = terms * math.sqrt(max(1.0, terms.numel() / max(expected.numel(), 1)))
        size = torch.maximum(size, _over_rows(_row_size(terms), expected))
    return size


def _row_size(tensor: Tensor) -> Tensor:
    """Return the largest finite magnitude of each row, as float64: (..., 1)."""
    size = tensor.double().abs().nan_to_num(nan=0.0, posinf=0.0)
    if not size.numel():
        return size.new_zeros(())
    return size.amax(-1, keepdim=True) if size.dim() else size


def _over_rows(size: Tensor, like: Tensor) -> Tensor:
    """Return ``size`` where it broadcasts to the rows of ``like``, else its largest number."""
    try:
        size.expand(like.shape)
    except RuntimeError:
        return size.max()
    return size
