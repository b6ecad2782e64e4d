"""Every text of a refusal, in a NoBackendError and in a FallbackWarning, word for word."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from error_calls import (
    DROPOUT,
    FIVE,
    INVALID,
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
from fusedops_npu.losses._rows import Rows
from fusedops_npu.rotary._rotary_limits import FewHeads, WholeHead
from fusedops_npu.routing._routing_limits import GroupsFit
from fusedops_npu.softmax._as_4d import ViewableAs4D

TABLE = Table(__file__, "fakes")
pin = TABLE.pin

SPEC = fusedops.TensorSpec((2, 4), capability=(7, 5), device="cuda")
pin("on rank", registered(Rank("x", 3), call=gelu(X)), NO_BACKEND)
pin("on a size", registered(Dim("x", (-1,), at_most=3), call=gelu(X)), NO_BACKEND)
short = Dim("x", (-1,), at_most=3, fix="use x[..., :3]")
pin("on a size with a fix of its own", registered(short, call=gelu(X)), NO_BACKEND)
pin("on a higher rank", registered(Rank("x", 1), call=gelu(X)), NO_BACKEND)
pin("on a small size", registered(Dim("x", (-1,), at_least=5), call=gelu(X)), NO_BACKEND)
pin(
    "on a range", registered(Scalar("p", 0.25), op="bias_dropout", form=DROPOUT, call=dropout(X, None, 0.5)), NO_BACKEND
)
pin("on absence", registered(Present("bias", False), call=gelu(X, X)), NO_BACKEND)
pin("on a multiple", registered(Dim("x", (-1,), multiple_of=8), call=gelu(X)), NO_BACKEND)
pin("on a dtype", registered(DType("x", torch.float16), call=gelu(X)), NO_BACKEND)
pin("on presence", registered(Present("bias"), call=gelu(X)), NO_BACKEND)
pin("on a number", registered(Scalar("approximate", one_of=("none",)), call=gelu(X)), NO_BACKEND)
pin("on a case", registered(When(DType("x", torch.float32), Rank("x", 3)), call=gelu(X)), NO_BACKEND)
pin("another device", registered(devices=("cuda",), call=gelu(X)), NO_BACKEND)
tpu = fusedops.TensorSpec((2, 4), device="tpu")
pin("an unknown device type", lambda: fusedops.explain("bias_gelu", tpu), INVALID)
pin("another op", registered(call=softmax(X)), NO_BACKEND)

pin(
    "Ascend's mask",
    registered(ViewableAs4D("mask", "x"), op=SOFTMAX, form=SOFTMAX_FORM, call=softmax(FIVE, FIVE[:, :1].bool())),
    NO_BACKEND,
)

ROTARY, ROTARY_FORM = "rotary_embedding", "q, k, cos, sin, interleaved, seq_dim"


def heads(batch: int, count: int, length: int, interleaved: bool = False) -> Callable[[], Any]:
    """A call within the limit of Ascend's kernel on the number of heads, or outside it."""
    q, cos = torch.ones(batch, count, length, 2), torch.ones(length, 1)
    call = partial(fusedops.rotary_embedding, q, None, cos, cos, interleaved=interleaved)
    return registered(FewHeads("q"), op=ROTARY, form=ROTARY_FORM, call=call)


pin("Ascend's heads", heads(3, 3, 1), NO_BACKEND)
pin("Ascend's most heads", heads(1, 1000, 125), NO_BACKEND)
pin("Ascend's pairs", heads(10, 100, 1, True), NO_BACKEND)
pin(
    "Ascend's partial heads",
    registered(
        WholeHead("cos", "q"),
        op=ROTARY,
        form=ROTARY_FORM,
        call=lambda: fusedops.rotary_embedding(FIVE[0], None, X[:1].mT, X[:1].mT),
    ),
    NO_BACKEND,
)

ROUTING_FORM = "logits, k, score, bias, groups, top_groups, group_score, normalize, eps, scale, index"
pin(
    "Ascend's groups",
    registered(
        GroupsFit("groups"),
        op="top_k_routing",
        form=ROUTING_FORM,
        call=lambda: fusedops.top_k_routing(torch.ones(1, 8), 2, groups=4, top_groups=2),
    ),
    NO_BACKEND,
)


pin("Ascend's rows", registered(Rows("x", 1), call=gelu(X)), NO_BACKEND)


def failing() -> None:
    raise OSError("driver too old")


pin("unavailable", registered(probe=unavailable, call=gelu(X)), NO_BACKEND)
pin("failed", registered(probe=failing, call=gelu(X)), NO_BACKEND)


def old_gpu() -> None:
    with fusedops.use("triton"):
        decision = fusedops.explain("bias_gelu", SPEC)
    raise NO_BACKEND(decision)


pin("an old GPU", old_gpu, NO_BACKEND)


def falling_back() -> None:
    alone(made(Rank("x", 3)))
    fusedops.bias_gelu(X)


pin("a fallback", falling_back, fusedops.FallbackWarning)

test_a_text, test_no_text_is_left_over = TABLE.tests()
