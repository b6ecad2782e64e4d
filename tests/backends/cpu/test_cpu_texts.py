"""Every text of an error and of a refusal of the cpu backend, word for word."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from error_calls import INVALID, NO_BACKEND
from error_texts import Table
from state import keep_backends

import fusedops
from fusedops.quantization import pack
from fusedops_cpu.launch.library import failure
from fusedops_cpu.launch.struct_call import _value
from fusedops_cpu.linear.linear import linear

TABLE = Table(__file__, "cpu_and_eager")
pin = TABLE.pin

ROW = torch.ones(2, 4)


@pytest.fixture
def cpu_and_eager(on_cpu: None) -> None:
    keep_backends("cpu", "eager")


def freed() -> None:
    x = torch.ones(2, 4)
    x.untyped_storage().resize_(0)
    fusedops.bias_gelu(x)


def freed_field() -> None:
    bias = torch.ones(4)
    bias.untyped_storage().resize_(0)
    _value(bias)


def another_processor() -> None:
    (limit,) = {each for each in linear.constraints if each.describe() == "an AMD processor, and torch with MKL"}
    weight = fusedops.TensorSpec((512, 512), torch.float32, "cpu", capability=(0, 0))
    raise fusedops.InvalidInputError(str(limit.reasons({"weight": weight})[0]))


def refused_by_the_library(status: int) -> Callable[[], None]:
    def run() -> None:
        raise failure(status)

    return run


pin("two dtypes", lambda: fusedops.bias_gelu(ROW, ROW[0].half()), NO_BACKEND)
pin("a weight", lambda: fusedops.rms_norm(ROW, ROW[0].double()), NO_BACKEND)
pin("gate and up", lambda: fusedops.swiglu(ROW, ROW.half()), NO_BACKEND)
pin("cosines", lambda: fusedops.rotary_embedding(ROW[None], None, *torch.ones(2, 2, 2).double()), NO_BACKEND)
pin("columns of FP8", lambda: fusedops.quantized_linear(ROW, pack(ROW, "FP8_ROW")), NO_BACKEND)
pin("no memory", freed, INVALID)
pin("a field of a call", freed_field, INVALID)
pin("the library", refused_by_the_library(2), INVALID)
pin("another processor", another_processor, INVALID)
pin("a target", refused_by_the_library(3), INVALID)
pin("a page", refused_by_the_library(4), INVALID)
pin("a slot", refused_by_the_library(5), INVALID)
pin("a key", refused_by_the_library(6), INVALID)

test_a_text, test_no_text_is_left_over = TABLE.tests()
