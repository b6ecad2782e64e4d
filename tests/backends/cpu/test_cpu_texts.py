"""Every text of an error and of a refusal of the cpu backend, word for word."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from error_calls import INVALID, NO_BACKEND
from error_texts import Table
from state import keep_backends

import fusedops
from fusedops_cpu._calls import _value
from fusedops_cpu._library import failure

TABLE = Table(__file__)
pin = TABLE.pin

ROW = torch.ones(2, 4)


def freed() -> None:
    x = torch.ones(2, 4)
    x.untyped_storage().resize_(0)
    fusedops.bias_gelu(x)


def freed_field() -> None:
    bias = torch.ones(4)
    bias.untyped_storage().resize_(0)
    _value(bias)


def refused_by_the_library(status: int) -> Callable[[], None]:
    def run() -> None:
        raise failure(status)

    return run


pin("two dtypes", lambda: fusedops.bias_gelu(ROW, ROW[0].half()), NO_BACKEND, "float16", "dtype of x", "to(x.dtype)")
pin("a weight", lambda: fusedops.rms_norm(ROW, ROW[0].double()), NO_BACKEND, "float64", "float32, bfloat16", "weight")
pin("gate and up", lambda: fusedops.swiglu(ROW, ROW.half()), NO_BACKEND, "float16", "dtype of gate", "to(gate.dtype)")
pin(
    "cosines",
    lambda: fusedops.rotary_embedding(ROW[None], None, *torch.ones(2, 2, 2).double()),
    NO_BACKEND,
    "float64",
    "float32, bfloat16",
    "cos",
)
pin("no memory", freed, INVALID, "got x without memory", "expected a tensor", "load it again")
pin("a field of a call", freed_field, INVALID, "of shape (4,) without memory", "expected a tensor", "call before it")
pin("the library", refused_by_the_library(2), INVALID, "without memory", "expected tensors", "pass tensors")
pin("a target", refused_by_the_library(3), INVALID, "is no class", "expected one in", "as ignore_index")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", TABLE.pins)
def test_a_text(name: str) -> None:
    keep_backends("cpu", "eager")
    TABLE.check(name)


def test_no_text_is_left_over() -> None:
    TABLE.check_complete()
