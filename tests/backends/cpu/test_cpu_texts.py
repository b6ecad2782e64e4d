"""Every text of an error and of a refusal of the cpu backend, word for word."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from error_calls import INVALID, NO_BACKEND
from error_texts import Table
from state import keep_backends

import fusedops

TABLE = Table(__file__)
pin = TABLE.pin

ROW = torch.ones(2, 4)


def backward(op: str, *args: Any) -> Callable[[], Any]:
    """Return a call of the kernel itself: what is invalid through ``torch.ops`` is an error before it gets there."""
    return lambda: getattr(import_module(f"fusedops_cpu.{op}"), f"{op}_backward").function(*args)


def freed() -> None:
    x = torch.ones(2, 4)
    x.untyped_storage().resize_(0)
    fusedops.bias_gelu(x)


def dropout(seed: torch.Tensor | None, bias: torch.Tensor | None, p: float) -> Callable[[], Any]:
    return backward("bias_dropout", ROW, seed, bias, p, True, torch.float32, [True, True])


pin("two dtypes", lambda: fusedops.bias_gelu(ROW, ROW[0].half()), NO_BACKEND, "float16", "dtype of x", "to(x.dtype)")
pin("no memory", freed, INVALID, "without memory", "expected tensors", "pass tensors")
pin(
    "a gradient of another shape",
    backward("scaled_masked_softmax", ROW[:1], ROW, 1.0, False),
    INVALID,
    "got grad (1, 4)",
    "expected that of y",
    "pass the gradient",
)
pin("a bias of another length", dropout(None, ROW[0, :3], 0.0), INVALID, "got bias (3,)", "one row", "pass the bias")
pin("no seed", dropout(None, None, 0.5), INVALID, "got seed None", "one int64 element", "pass the seed")
pin("p above 1", dropout(torch.tensor([1]), None, 1.5), INVALID, "got p = 1.5", "expected [0, 1]", "pass the p")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", TABLE.pins)
def test_a_text(name: str) -> None:
    keep_backends("cpu", "eager")
    TABLE.check(name)


def test_no_text_is_left_over() -> None:
    TABLE.check_complete()
