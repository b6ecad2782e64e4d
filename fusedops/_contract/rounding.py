"""The generic error bound of an op: the rounding errors of its formula, found by running it (Higham 2002, section 3.3).

The formula runs once, in float64. Each number has beside it the largest error that it may have in the arithmetic of a
kernel: what an operation makes of the errors of its operands, and its own rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from fusedops._contract.evidence import finite_size
from fusedops._torch import TorchDispatchMode
from fusedops.dtypes import compute_dtype

_DRIFT = 0.03  # of a sum of equal terms that are added one by one: a share of their number
_SATURATED = 20.0  # the argument beyond which tanh and erf are 1 in float64 too
_ORDINARY = 1e5  # of numbers up to it, the formulas have no product that overflows
_EPS = torch.finfo(torch.float64).eps

#: By operation, the sizes of derivatives, from x and y.
_SLOPES: Mapping[str, Callable[[Tensor, Tensor], Tensor | float]] = {
    "neg": lambda x, y: 1.0,
    "abs": lambda x, y: 1.0,
    "exp": lambda x, y: y,
    "sigmoid": lambda x, y: y * (1 - y),
    "tanh": lambda x, y: 1 - y * y,
    "erf": lambda x, y: torch.exp(-x * x) * (2 / math.sqrt(math.pi)),
    "gelu": lambda x, y: 1.13,
}
#: By operation that moves numbers, the indices of the numbers among its arguments: they have no error.
_MOVES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("view", "_unsafe_view", "slice", "select", "expand", "unsqueeze", "squeeze", "permute"), ()),
    **dict.fromkeys(("transpose", "t", "squeeze_", "cat", "stack", "clone", "detach", "alias", "sum", "mean"), ()),
    "masked_fill": (2,),
    "where": (1, 2),
}


def error_bound_of(
    formula: Callable[..., Any],
    dtype_of: tuple[int, ...] | None = None,
    rounded_to: int | None = None,
) -> Callable[..., Any]:
    """Return the error bound of a formula, for :class:`fusedops.Evidence`. Each rounding is ``absolute`` of a number.

    Args:
        formula: the op's reference or backward, in plain torch.
        dtype_of: the indices of the arguments whose dtypes make that of the arithmetic. None: all tensors.
        rounded_to: the same, of the dtype to which tensors are rounded first, as the op has it. None: to none.

    >>> bound = error_bound_of(lambda x, y: x + y)
    >>> bound(1e-6, torch.tensor([3.0]), torch.tensor([-2.0]))  # of both numbers and of the sum
    tensor([6.0000e-06], dtype=torch.float64)
    """

    def bound(absolute: float, *args: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()]
        dtype = torch.float32
        for each in tensors if dtype_of is None else [args[index] for index in dtype_of]:
            dtype = torch.promote_types(dtype, compute_dtype(each.dtype if isinstance(each, Tensor) else each))
        narrow = None if rounded_to is None else args[rounded_to].dtype
        numbers = [abs(arg) for arg in args if type(arg) in (int, float)]
        large = [float(each.abs().amax()) for each in tensors if each.numel()]
        careful = not all(number <= _ORDINARY for number in (*numbers, *large))
        run = _Run(max(absolute, 4 * torch.finfo(dtype).eps), torch.finfo(dtype), careful)
        with torch.inference_mode(False), torch.no_grad():  # in inference mode, operations are not decomposed
            wide = [run.argument(arg, narrow) for arg in args]
            with run:
                results = formula(*wide)
        return _open(results) if isinstance(results, Tensor) else tuple(map(_open, results))

    return bound


def _error(value: Any) -> Any:
    """Return the error of a tensor or a number; None for None."""
    if not isinstance(value, Tensor):
        return None if value is None else 0.0
    error = cast("Tensor | None", getattr(value, "rounding_error", None))
    return torch.zeros_like(value) if error is None else error


def _open(result: Any) -> Any:
    """Return the error of a result, inf where it is not determined."""
    error = _error(result)
    return error.nan_to_num(nan=math.inf, posinf=math.inf) if isinstance(error, Tensor) else error


def _moved(value: Any) -> Any:
    """Return an argument of an operation that moves numbers, with errors in place of the numbers."""
    if isinstance(value, (list, tuple)):
        return [_moved(each) for each in cast("list[Any]", value)]
    return _error(value) if isinstance(value, Tensor) and value.dtype is torch.float64 else value


def _size(value: Any) -> Any:
    return value.abs() if isinstance(value, Tensor) else abs(value)


def _has_error(value: Any) -> bool:
    """Return True for a number that follows from one of the formula's arguments."""
    if isinstance(value, (list, tuple)):
        return any(map(_has_error, cast("list[Any]", value)))
    return hasattr(value, "rounding_error")


class _Run(TorchDispatchMode):
    """Runs operations of float64 tensors, and keeps beside each result its error, as an attribute.

    Args:
        unit: the rounding of a number, as a share of it.
        arithmetic: of the kernels.
        careful: True where numbers may be infinite, or overflow.
    """

    def __init__(self, unit: float, arithmetic: torch.finfo, careful: bool) -> None:
        super().__init__()
        self.unit, self.arithmetic, self.careful = unit, arithmetic, careful

    def argument(self, value: Any, narrow: torch.dtype | None) -> Any:
        """Return an argument in float64, with the error of one rounding, and of that to a narrow dtype."""
        if isinstance(value, torch.dtype):
            return torch.float64
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        wide: Any = value.to(torch.float64, copy=True)
        wide.rounding_error = self.unit * wide.abs().nan_to_num(nan=0.0, posinf=0.0)
        if narrow is not None:
            wide.rounding_error += (value.to(narrow).double() - wide).abs().nan_to_num(nan=0.0)
        return wide

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result: Any = func(*args, **(kwargs or {}))
        if not _has_error(args):
            return result
        several = type(result) in (list, tuple)  # which has no rule
        if several or (isinstance(result, Tensor) and result.dtype is torch.float64):
            cast("Any", result).rounding_error = self._error_of(func, result, args, kwargs or {})
        elif func is torch.ops.aten.gt.Scalar:  # as a number it is off by 1 on either side of the step
            cast("Any", result).rounding_error = ((args[0] - args[1]).abs() <= _error(args[0])).double()
        return result

    def _error_of(self, func: Any, y: Any, args: Any, kwargs: Any) -> Tensor:
        """Return the error of a result."""
        name: str = func._schema.name.removeprefix("aten::")
        x, *others = args
        if name in _SLOPES:
            error, own = _SLOPES[name](x, y) * _error(x), y.abs()
            if name in ("tanh", "erf"):
                own.masked_fill_(x.abs() > _SATURATED, _EPS / self.unit)
            elif name == "gelu":
                own = x.abs().clamp_(max=10.0)  # 1 + tanh and 1 + erf cancel below 0
        elif name in ("add", "sub", "rsub"):
            error, own = _error(x) + abs(kwargs.get("alpha", 1)) * _error(others[0]), y.abs()
        elif name == "mul":
            x, other = (x, others[0]) if isinstance(x, Tensor) else (others[0], x)
            error, own = _error(x) * _size(other), y.abs()
            if isinstance(other, Tensor):
                error = torch.addcmul(error, x.abs() + _error(x), _error(other))
        elif name == "div":
            error, own = (_error(x) + y.abs() * _error(others[0])) / _size(others[0]), y.abs()
        elif name in ("mm", "mv", "bmm"):
            size = func(finite_size(x), finite_size(others[0]))
            error = func(_error(x), finite_size(others[0])) + func(finite_size(x), _error(others[0]))
            error.masked_fill_(size >= self.arithmetic.max / 2, math.inf)
            own = _DRIFT * x.shape[-1] * y.abs()  # the errors of the factors are as large as a sum of both signs
        elif name == "pow" and others == [2]:
            error, own = _error(x) * (2 * x.abs() + _error(x)), y.abs()
        elif name == "rsqrt":
            error, own = torch.rsqrt((x - _error(x)).clamp_(min=0.0)) - y, y  # inf where x may be 0
        elif name in ("clamp", "relu"):
            moved = [func(x + sign * _error(x), *others, **kwargs) - y for sign in (1, -1)]
            return torch.maximum(moved[0].abs(), moved[1].abs())
        elif name == "_to_copy":
            return _error(x)
        elif name in _MOVES:
            error = func(*[0.0 if i in _MOVES[name] and isinstance(each, (int, float)) else _moved(each)
                           for i, each in enumerate(args)], **kwargs)  # fmt: skip
            if name not in ("sum", "mean"):
                return error
            terms = x.numel() / max(y.numel(), 1)
            squares = (terms if name == "sum" else 1) * func(x * x, *others, **kwargs)
            own = squares.sqrt_() + _DRIFT * terms * y.abs()
        elif name == "ones_like":
            return torch.zeros_like(y)
        else:
            raise NotImplementedError(f"got the operation {name}, expected one with a rule here; to fix: add its rule")
        error = torch.add(error, own.add_(self.arithmetic.tiny / self.unit), alpha=self.unit)
        if self.careful:
            given = all(bool(each.isfinite().all()) for each in args if isinstance(each, Tensor))
            # a number that is not finite gives the same in any arithmetic
            error = torch.where(
                y.isfinite(), error.nan_to_num(nan=math.inf, posinf=math.inf), math.inf if given else 0.0
            )
            error = error.masked_fill(y.isfinite() & (y.abs() >= self.arithmetic.max), math.inf)
        return error
