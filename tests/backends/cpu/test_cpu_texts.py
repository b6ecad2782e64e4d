"""Every text of an error and of a refusal of the cpu backend, word for word."""

from __future__ import annotations

import pytest
import torch
from error_calls import INVALID, NO_BACKEND
from error_texts import Table
from state import keep_backends

import fusedops
from fusedops_cpu._library import failure

TABLE = Table(__file__)
pin = TABLE.pin

ROW = torch.ones(2, 4)


def freed() -> None:
    x = torch.ones(2, 4)
    x.untyped_storage().resize_(0)
    fusedops.bias_gelu(x)


def refused_by_the_library() -> None:
    raise failure(2)


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
pin("the library", refused_by_the_library, INVALID, "without memory", "expected tensors", "pass tensors")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", TABLE.pins)
def test_a_text(name: str) -> None:
    keep_backends("cpu", "eager")
    TABLE.check(name)


def test_no_text_is_left_over() -> None:
    TABLE.check_complete()
