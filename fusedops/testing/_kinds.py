"""The kinds of checks, for any op: the name, the directions, the contract, and the function that yields the cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from fusedops._contract.op import Op
from fusedops._report.direction import Direction
from fusedops.testing import (
    _check_calls,
    _check_constraints,
    _check_forms,
    _check_inputs,
    _check_rows,
    _check_saved,
    _check_situations,
    _check_sizes,
    _check_storages,
    _check_torch,
    _check_values,
)
from fusedops.testing._roles import masks
from fusedops.testing._subject import Subject
from fusedops.testing._trial import Trial

Side = Literal["forward", "backward", "both"]


class Kind(NamedTuple):
    """A kind of check.

    Attributes:
        name: its name.
        sides: the directions that it has; "both" is a call with its gradient.
        contract: what it checks, as a phrase.
        trials: yields the cases.
        concerns: tells whether it applies to an op.
    """

    name: str
    sides: tuple[Side, ...]
    contract: str
    trials: Callable[[Subject, Direction], Iterator[Trial]]
    concerns: Callable[[Op], bool] = lambda op: True


def _several(op: Op) -> bool:
    return len(op.differentiable) > 1


def _masked(op: Op) -> bool:
    return bool(masks(op))


def _saving(op: Op) -> bool:
    return bool(op.saved)


_EACH: tuple[Side, ...] = ("forward", "backward")
KINDS = (
    Kind("kernel", _EACH, "a kernel for each direction, which takes some call of the op", _check_forms.kernel),
    Kind(
        "constraints",
        _EACH,
        "calls inside a declared constraint are served, and right; calls outside are refused, with the reason",
        _check_constraints.constraints,
    ),
    Kind("float64", _EACH, "within the op's tolerance of its reference in float64", _check_values.float64),
    Kind(
        "calls", _EACH, "the same for calls made pairwise of all that the op's constraints accept", _check_calls.calls
    ),
    Kind(
        "inputs",
        _EACH,
        "no input is written, nor a gradient of an output, nor held after the call",
        _check_inputs.inputs,
    ),
    Kind(
        "dtypes",
        _EACH,
        "the output has the promoted dtype, each gradient its own input's",
        _check_forms.dtypes,
        _several,
    ),
    Kind("strides", _EACH, "tensors of any strides, gradients too", _check_forms.strides),
    Kind("empty", _EACH, "tensors without elements", _check_forms.empty),
    Kind(
        "special", ("forward",), "NaN, inf and large values go where the reference lets them go", _check_values.special
    ),
    Kind(
        "masked_rows",
        _EACH,
        "a fully masked row is exactly 0, and so is its gradient",
        _check_values.masked_rows,
        _masked,
    ),
    Kind(
        "dropout",
        _EACH,
        "the elements kept are those of fusedops.testing.keep_mask",
        _check_values.dropout,
        _check_values.has_dropout,
    ),
    Kind(
        "saved",
        _EACH,
        "saved values are their references', for any backend's backward; an optional one may be None",
        _check_saved.saved,
        _saving,
    ),
    Kind(
        "needs",
        ("backward",),
        "any one or two of the gradients, or all but one, may be wanted, and any output may have the only gradient",
        _check_situations.needs,
        _several,
    ),
    Kind(
        "infinite",
        ("backward",),
        "infinite inputs reach no other gradient than by the formula",
        _check_situations.infinite,
    ),
    Kind(
        "sizes",
        _EACH,
        "the same for sizes beside 64, 128 and 256, and beyond 4,096 to 2^20 where that is quick",
        _check_sizes.sizes,
    ),
    Kind(
        "shared",
        _EACH,
        "one tensor may be several arguments, and several in the next call",
        _check_situations.shared,
        _check_situations.shares,
    ),
    Kind(
        "threads",
        _EACH,
        "the same in another thread, on three threads of torch, and two calls at a time",
        _check_situations.threads,
    ),
    Kind("between", _EACH, "a call is right between calls with other tensors of its sizes", _check_situations.between),
    Kind(
        "recorded",
        ("forward",),
        "a recorded call, made again, has the bits of a call with the numbers that its tensors have then",
        _check_situations.recorded,
    ),
    Kind(
        "freed",
        _EACH,
        "a freed tensor is an InvalidInputError, optional ones and seeds too, but for one that backward does not read",
        _check_storages.freed,
    ),
    Kind(
        "swapped",
        ("backward",),
        "backward reads the memory that a saved tensor has by then; other sizes are an InvalidInputError",
        _check_storages.swapped,
    ),
    Kind("fake", _EACH, "shapes, dtypes and strides are those of the op's fake tensors", _check_torch.fake),
    Kind("determinism", _EACH, "the same bits on every run", _check_forms.determinism),
    Kind(
        "rows",
        _EACH,
        "a row has the same bits whatever the other rows are, on any number of threads, where the kernel promises it",
        _check_rows.rows_independent,
    ),
    Kind("memory", _EACH, "each result is in memory of its own, of this call alone", _check_calls.memory),
    Kind(
        "written",
        _EACH,
        "right where new memory holds NaN: each element of a result is written, and none read before",
        _check_calls.written,
    ),
    Kind("history", _EACH, "a result depends on the arguments, not on calls before", _check_calls.history),
    Kind(
        "state",
        _EACH,
        "modes, defaults, threads and random numbers of the process stay as they are",
        _check_calls.state,
    ),
    Kind("autograd", ("both",), "forward and backward of one call by one backend", _check_torch.autograd),
    Kind("opcheck", ("both",), "torch.library.opcheck reports nothing", _check_torch.opcheck),
    Kind("compile", ("both",), "the same within torch.compile(fullgraph=True)", _check_torch.compile_),
    Kind("checkpoint", ("both",), "the same within an activation checkpoint", _check_torch.checkpoint),
)


def kind_of(name: str) -> Kind:
    """Return the kind of a check by its name."""
    return next(kind for kind in KINDS if kind.name == name)
