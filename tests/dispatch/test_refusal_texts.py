"""Every text of a refusal, in a NoBackendError and in a FallbackWarning, word for word."""

import pytest
import torch
from error_calls import (
    DROPOUT,
    FIVE,
    NO_BACKEND,
    SOFTMAX,
    SOFTMAX_FORM,
    X,
    alone,
    dropout,
    gelu,
    made,
    registered,
    softmax,
    unavailable,
)
from error_texts import Table

import fusedops
from fusedops.constraints import Dim, DType, Present, Rank, Scalar, When
from fusedops_npu._as_4d import ViewableAs4D

TABLE = Table(__file__)
pin = TABLE.pin

SPEC = fusedops.TensorSpec((2, 4), capability=(7, 5), device="cuda")
pin("on rank", registered(Rank("x", 3), call=gelu(X)), NO_BACKEND, "got x with 2 dim", "expected 3 dim", "leading ones")
pin(
    "on a size",
    registered(Dim("x", (-1,), at_most=3), call=gelu(X)),
    NO_BACKEND,
    "= 4",
    "expected a size of",
    "split x",
)
pin(
    "on a higher rank",
    registered(Rank("x", 1), call=gelu(X)),
    NO_BACKEND,
    "got x with 2 dim",
    "expected 1 dim",
    "merge leading",
)
pin(
    "on a small size",
    registered(Dim("x", (-1,), at_least=5), call=gelu(X)),
    NO_BACKEND,
    "= 4",
    "at least 5",
    "pad dim -1",
)
pin(
    "on a range",
    registered(Scalar("p", 0.25), op="bias_dropout", form=DROPOUT, call=dropout(X, None, 0.5)),
    NO_BACKEND,
    "got p = 0.5",
    "in [-0.25, 0.25]",
    "pass p as",
)
pin(
    "on absence",
    registered(Present("bias", False), call=gelu(X, X)),
    NO_BACKEND,
    "got a bias",
    "expected no bias",
    "call it with",
)
pin("on a multiple", registered(Dim("x", (-1,), multiple_of=8), call=gelu(X)), NO_BACKEND, "= 4", "of 8", "from 4 to 8")
pin(
    "on a dtype",
    registered(DType("x", torch.float16), call=gelu(X)),
    NO_BACKEND,
    "float32",
    "expected float16",
    "convert x",
)
pin(
    "on presence",
    registered(Present("bias"), call=gelu(X)),
    NO_BACKEND,
    "got bias = None",
    "expected a bias",
    "call it with a bias",
)
pin(
    "on a number",
    registered(Scalar("approximate", one_of=("none",)), call=gelu(X)),
    NO_BACKEND, "got approximate = 'tanh'", "expected 'none'", "pass approximate as",
)  # fmt: skip
pin(
    "on a case",
    registered(When(DType("x", torch.float32), Rank("x", 3)), call=gelu(X)),
    NO_BACKEND, "got x with 2 dim", "expected 3 dimensions (with x: float32)", "view x",
)  # fmt: skip
pin("another device", registered(devices=("cuda",), call=gelu(X)), NO_BACKEND, "not cpu", "serves cuda", "move the")
pin("another op", registered(call=softmax(X)), NO_BACKEND, "has no kernel", "to fix    mine", "prefer eager")

pin(
    "Ascend's mask",
    registered(ViewableAs4D("mask", "x"), op=SOFTMAX, form=SOFTMAX_FORM, call=softmax(FIVE, FIVE[:, :1].bool())),
    NO_BACKEND, "(2, 1, 2, 4, 4)", "leading dims", "expand mask to",
)  # fmt: skip


def failing() -> None:
    raise OSError("driver too old")


pin(
    "unavailable",
    registered(probe=unavailable, call=gelu(X)),
    NO_BACKEND,
    "libmine.so is missing",
    "to fix    mine",
    "install libmine",
)
pin(
    "failed",
    registered(probe=failing, call=gelu(X)),
    NO_BACKEND,
    "driver too old",
    "to fix    mine",
    "correct mine, or call",
)


def old_gpu() -> None:
    with fusedops.use("triton"):
        decision = fusedops.explain("bias_gelu", SPEC)
    raise NO_BACKEND(decision)


pin("an old GPU", old_gpu, NO_BACKEND, "compute capability 7.5", "expected at least 8.0", "run on a newer")


def falling_back() -> None:
    alone(made(Rank("x", 3)))
    fusedops.bias_gelu(X)


pin("a fallback", falling_back, fusedops.FallbackWarning, "got x with 2 dim", "expected 3 dim", "view x with 3")


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", TABLE.pins)
def test_a_text(name: str) -> None:
    TABLE.check(name)


def test_no_text_is_left_over() -> None:
    TABLE.check_complete()
