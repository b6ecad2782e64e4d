"""Every text of a refusal, in a NoBackendError and in a FallbackWarning, word for word."""

from collections.abc import Callable
from functools import partial
from typing import Any

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
from fusedops_npu._rotary_limits import FewHeads, WholeHead
from fusedops_npu._rows import Rows

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

ROTARY, ROTARY_FORM = "rotary_embedding", "q, k, cos, sin, interleaved, seq_dim"


def heads(batch: int, count: int, length: int, interleaved: bool = False) -> Callable[[], Any]:
    """A call within the limit of Ascend's kernel on the number of heads, or outside it."""
    q, cos = torch.ones(batch, count, length, 2), torch.ones(length, 1)
    call = partial(fusedops.rotary_embedding, q, None, cos, cos, interleaved=interleaved)
    return registered(FewHeads("q"), op=ROTARY, form=ROTARY_FORM, call=call)


pin("Ascend's heads", heads(3, 3, 1), NO_BACKEND, "B = 3, N = 3, S = 1", "B * N at most 8 * S", "pass seq_dim=-3")
pin("Ascend's most heads", heads(1, 1000, 125), NO_BACKEND, "N = 1000", "B and N below 1000", "split the batch or the")
pin("Ascend's pairs", heads(10, 100, 1, True), NO_BACKEND, "B = 10, N = 100", "B * N below 1000", "split the batch")
pin(
    "Ascend's partial heads",
    registered(
        WholeHead("cos", "q"),
        op=ROTARY,
        form=ROTARY_FORM,
        call=lambda: fusedops.rotary_embedding(FIVE[0], None, X[:1].mT, X[:1].mT),
    ),
    NO_BACKEND, "cos of 1 entries for heads of 4", "half of the last dim of q", "rotate q[..., :R] alone",
)  # fmt: skip


pin(
    "Ascend's rows",
    registered(
        Rows("x", 1), call=gelu(X)
    ),
    NO_BACKEND, "got 2 rows of x", "at most 1 rows", "split x into parts of at most 1 rows",
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
