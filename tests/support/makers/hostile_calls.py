"""What takes the place of an argument of a valid call: values that are invalid by themselves, and odd tensors.

Which values are invalid is decided here, by the kind of the argument, and not by the code under test.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedops import Op, TensorSpec, testing
from fusedops.constraints import (
    Alignment,
    Broadcasts,
    Constraint,
    Count,
    DType,
    Finite,
    Flag,
    Integer,
    LastDims,
    OneElement,
    OneOf,
    Probability,
    SameShape,
    Window,
)
from fusedops.ops.attention.arguments import KeyCount
from fusedops.testing._kernel_calls import KernelCalls
from fusedops.testing._variants import variants

ONE = torch.tensor([7])


class Posing:
    """Looks like a tensor to whoever asks for few attributes."""

    dtype, shape, device, is_cpu, layout, is_nested = torch.float32, (4, 4), torch.device("cpu"), True, torch.strided, 0

    def dim(self) -> int:
        return 2

    def get_device(self) -> int:
        return -1


NO_NUMBERS = ("1", [1.0], 1j, 10**400, math.nan, math.inf, -math.inf, np.ones(3), torch.ones(2), object())
NO_TENSORS = ("x", [[1.0, 2.0]], (), {}, torch.float32, np.ones((4, 4), np.float32), Posing(), TensorSpec((4, 4)))
NO_TENSORS += (TensorSpec((4, 4), torch.bool), object(), 10**400, range(4), torch.Size([4, 4]), np.float32(1))

WRONG_SEEDS = (2**64, -(2**63) - 1, 1.5, True, "1", [1], np.int64(1), torch.tensor([1.0]), torch.arange(2))
WRONG_SEEDS += (ONE.int(), ONE.to_sparse(), torch.empty(0, dtype=torch.int64), np.ones(1, int), TensorSpec((1,)))

WRONG: dict[type[Constraint], tuple[Any, ...]] = {
    Flag: (1, 0, None, "yes", np.True_, torch.tensor(True), torch.ones(2) > 0, np.ones(2), []),
    Finite: (*NO_NUMBERS, np.float32(1), torch.tensor(1.0), 1e39, -1e300, Fraction(1, 2), Decimal(1), 2**1030),
    Probability: (*NO_NUMBERS, -0.1, 1.1, None, torch.tensor(0.5), np.float32(0.3), Fraction(1, 2), Decimal(0)),
    OneOf: (None, "erf", "", "TANH", 1, True, ["tanh"], ONE, np.ones(2), b"tanh", {}, -1, 2, "-2", -2.0),
    Integer: (1.0, None, "1", 2**63, np.int64(1), True, ONE),
    **dict.fromkeys((Count, KeyCount), (0, -1, 1.5, "1", [1], np.ones(2))),
    Alignment: ("", "left", 1, None, ["none"], b"none", ONE),
    Window: (3, "ab", (1,), (1, -1), (1.0, 2), [1, 2, 3], ONE),
}

DTYPES = (torch.int8, torch.int32, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16)


@cache
def valid_calls(name: str) -> list[dict[str, Any]]:
    """Return calls of the op, made from all that its constraints accept, as a brief run of the conformance kit does."""
    op = testing.OPS[name]
    return [each.tensors(op) for each in variants(KernelCalls("eager", op, "cpu", 2**11, brief=True), "forward")]


def bad_values(op: Op, call: dict[str, Any], name: str) -> list[Any]:
    """Return values that are invalid for an argument of a call, whatever the others are."""
    own = [each for each in op.constraints if each.name == name]
    bad = [value for each in own for value in WRONG.get(type(each), ())]
    if op.signature.parameters[name].default is None:
        bad = [value for value in bad if value is not None]
    if str(op.signature.parameters[name].annotation).startswith("bool |"):  # a flag, or one of several names
        bad = [value for value in bad if value is not True]
    for each in own:
        if isinstance(each, OneElement):
            return [*(WRONG_SEEDS if torch.int64 in each.dtypes else NO_NUMBERS), torch.ones(2), ONE.to("meta")]
        if isinstance(each, Finite):
            bad += [] if each.optional else [None]
            bad += [] if each.at_least is None else [-1.0, -1]
    if not op.types[name].startswith("Tensor"):
        return bad
    of_rows = str(op.signature.parameters[name].annotation).startswith(("float", "int"))  # or a number for all rows
    bad += [*NO_TENSORS, *([] if of_rows else [1.0]), True, *([] if op.types[name].endswith("None") else [None])]
    value = call[name]
    if not isinstance(value, Tensor):
        return bad
    accepted = {dtype for each in own if isinstance(each, DType) for dtype in each.dtypes}
    bad += [value.to(dtype) for dtype in DTYPES[2 * of_rows :] if dtype not in accepted]
    bad += [made for make in _WRONG_LOOKS if (made := _made(make, value)) is not None]
    if name != op.parameters[0]:
        bad += [value.to("meta"), value.expand((2,) * 13 + value.shape)]
        if value.dim() and any(isinstance(each, (SameShape, Broadcasts, LastDims)) for each in own):
            bad.append(value.new_zeros(()).expand(*value.shape[:-1], value.shape[-1] + 4099))
    return bad


def _made(make: Callable[[Tensor], Tensor], plain: Tensor) -> Tensor | None:
    """Return the tensor that a function makes, or None where torch makes none of this one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls some of them beta, prototypes or deprecated
        try:
            return make(plain)
        except (RuntimeError, IndexError, TypeError):
            return None


_WRONG_LOOKS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t.to_sparse(),
    lambda t: t.to_sparse_csr(),
    lambda t: t.to_mkldnn(),
    lambda t: torch.nested.nested_tensor(list(t)),
    lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
)


class Sub(Tensor):
    """A plain subclass: it goes through the registered op."""


def negated(plain: Tensor) -> Tensor:
    """Return the same values as a view with the negative bit set."""
    return torch.complex(torch.zeros_like(plain), -plain).conj().imag


def _inference(plain: Tensor) -> Tensor:
    with torch.inference_mode():
        return plain.clone()


LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "subclass": lambda t: t.as_subclass(Sub),
    "huge stride": lambda t: t.as_strided(t.shape, [s if n > 1 else 2**55 for n, s in zip(t.shape, t.stride())]),
    "inference": _inference,
}
