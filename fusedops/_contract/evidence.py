"""Evidence: how the kernels of an op are checked, measured and described. No call of an op reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops._contract.signature import spread
from fusedops._report.direction import Direction
from fusedops.dtypes import STORAGE


class Tolerance(NamedTuple):
    """The largest accepted difference from the float64 reference: ``relative * |want|``, plus ``absolute`` in the units
    of the op's error bound.

    ``relative`` covers the rounding of the result. ``absolute`` is for numbers of about 1: the error bound of the op
    (``error_bound`` and ``gradient_error_bound`` of :class:`Evidence`) makes it an error of each element.

    >>> import fusedops
    >>> fusedops.Tolerance(1e-6, 1e-5).absolute
    1e-06
    """

    absolute: float
    relative: float


def tolerances(
    float32: tuple[float, float],
    float64: tuple[float, float],
    *,
    absolute: float | None = None,
    absolute_roundings: float = 0.0,
    roundings: float = 1.0,
) -> dict[torch.dtype, Tolerance]:
    """Return the tolerance of each dtype in which tensors are stored.

    Args:
        float32: (absolute, relative) of float32, in which the narrower dtypes are computed too.
        float64: (absolute, relative) of float64.
        absolute: the absolute tolerance of the narrower dtypes; None: float32's.
        absolute_roundings: added to ``absolute``, in units of a dtype's rounding.
        roundings: the relative tolerance of the narrower dtypes, in these units: 1 is twice the error of a rounding.

    >>> tolerances((2e-6, 1e-6), (1e-14, 1e-12))[torch.bfloat16]
    Tolerance(absolute=2e-06, relative=0.008)
    """
    result = {torch.float32: Tolerance(*float32), torch.float64: Tolerance(*float64)}
    narrow = float32[0] if absolute is None else absolute
    unit = 1.024  # 1e-3 of float16, 8e-3 of bfloat16
    for dtype, storage in STORAGE.items():
        step = unit * storage.rounding
        result.setdefault(dtype, Tolerance(narrow + absolute_roundings * step, roundings * step))
    return result


class Case(NamedTuple):
    """A named call from a real model, from which tests and benchmarks are made.

    Args:
        name: short, unique within the op.
        args: the arguments by name. A tuple is the shape of a tensor; anything else is passed as it is.
        source: the model or document that the sizes come from.

    >>> import fusedops
    >>> fusedops.Case("gpt2", {"x": (8, 1024, 768), "eps": 1e-5}, "GPT-2 small").name
    'gpt2'
    """

    name: str
    args: Mapping[str, Any]
    source: str = ""


@dataclass(frozen=True)
class Rows:
    """One kind of independent rows of an op: each row of the results depends on the same row of the arguments alone.

    Args:
        name: in the plural, unique within the op.
        call: ``(count) -> arguments by name``, a call of so many rows, as in :class:`Case`.
        dims: the dim of the rows in each argument and output that has them; the other arguments are the same for all.
        packed: for each tensor that has the rows one after another in its dim, the argument with their bounds.
        up_to: the dim of each argument that a row needs up to its own position, counted from the end, and no further,
            as the keys of a causal attention.

    >>> import fusedops
    >>> rows = fusedops.Rows("rows", lambda count: {"x": (count, 67)}, {"x": 0, "y": 0})
    >>> rows.call(3)
    {'x': (3, 67)}
    """

    name: str
    call: Callable[[int], Mapping[str, Any]]
    dims: Mapping[str, int]
    packed: Mapping[str, str] = field(default_factory=dict[str, str])
    up_to: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The data by which the kernels of an op are checked, measured and described: for verify, the kit and pages.

    Args:
        formula: one line for tables.
        cases: real calls.
        tolerance: of the outputs, by dtype: of the output with an error bound, of the coarsest tensor without.
        gradient_tolerance: of the gradients: wider, as backward starts from rounded values and subtracts.
        min_bytes: from the arguments, the fewest bytes that a kernel must move, by direction.
        unfused: the chain of torch functions that a model runs without fused ops, the baseline of benchmarks. Takes
            the op's parameters in order.
        error_bound: ``(absolute, *arguments on the CPU) -> tensor``, or a tuple: for each output the largest error of a
            correct kernel before rounding; inf where it may overflow. None: ``absolute`` times the largest of each row.
        gradient_error_bound: the same for the gradients, from the arguments of backward.
        pin_choice: ``(arguments, outputs) -> arguments``, on the CPU, for an op whose integer outputs depend on
            rounding: the arguments that fix the choice of these outputs if it is correct, else the reference's. The
            outputs are compared with the reference for these arguments. None: all correct kernels return the same
            integers.
        sample: ``(batch, length) -> arguments by name``, a small call for tests of torch's features and of DTensor;
            tuples are shapes. None: the first case.
        large: the calls that benchmarks measure, which fill a device. None: the cases.
        sweep: ``(rows, width) -> arguments by name``, for benchmarks over lengths and sizes.
        rows: the kinds of rows by which the promise ``rows_independent`` of a kernel is checked.
        peers: a Markdown table of what other libraries accept, for the pages.
        sharded: what may be sharded, in words, for the pages: of the first parameter, of the others, and how the
            gradients are placed.

    >>> import fusedops
    >>> fusedops.ops.OPS["bias_gelu"].evidence.formula
    'gelu(x + bias)'
    """

    formula: str
    cases: Sequence[Case]
    tolerance: Mapping[torch.dtype, Tolerance]
    gradient_tolerance: Mapping[torch.dtype, Tolerance]
    min_bytes: Callable[..., Mapping[Direction, int]]
    unfused: Callable[..., Any]
    error_bound: Callable[..., Any] | None = None
    gradient_error_bound: Callable[..., Any] | None = None
    pin_choice: Callable[[Sequence[Any], Sequence[Tensor]], tuple[Any, ...]] | None = None
    sample: Callable[[int, int], Mapping[str, Any]] | None = None
    large: Sequence[Case] | None = None
    sweep: Callable[[int, int], Mapping[str, Any]] | None = None
    rows: Sequence[Rows] = ()
    peers: str = ""
    sharded: tuple[str, str, str] | None = None

    def __post_init__(self) -> None:
        for name in ("min_bytes", "unfused", "error_bound", "gradient_error_bound"):
            function = getattr(self, name)
            if function is not None:
                object.__setattr__(self, name, spread(function))

    @property
    def measured(self) -> Sequence[Case]:
        """Return the calls that benchmarks measure: ``large``, or the cases."""
        return self.cases if self.large is None else self.large


def rows_of_two_widths(call: Callable[[int, int], Mapping[str, Any]], *names: str, more: str = "") -> list[Rows]:
    """Return two kinds of rows in dim 0: of 67 columns, and wide enough that a library may split the sum over one row.

    Args:
        call: ``(rows, columns) -> arguments by name``.
        names: the arguments and outputs that have rows.
        more: added to the names of the kinds.

    >>> [rows.name for rows in rows_of_two_widths(lambda count, width: {"x": (count, width)}, "x", "y")]
    ['rows', 'wide rows']
    """
    dims = dict.fromkeys(names, 0)
    return [
        Rows(f"rows{more}", lambda count: call(count, 67), dims),
        Rows(f"wide rows{more}", lambda count: call(count, 40011), dims),
    ]


def finite_size(tensor: Tensor) -> Tensor:
    """Return the magnitudes in float64 for an error bound, and 0 for numbers that are not finite: they have no error.

    >>> finite_size(torch.tensor([-2.0, torch.inf]))
    tensor([2., 0.], dtype=torch.float64)
    """
    return tensor.double().abs().nan_to_num(nan=0.0, posinf=0.0)
