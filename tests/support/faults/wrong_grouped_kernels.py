"""Wrong kernels of grouped_matmul, for the list in ``wrong_kernels``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from wrong_kernels import Run, wrong

from fusedops.ops.experts.formulas import group_of_rows

GROUPED = "grouped_matmul"


def tail(a: SimpleNamespace) -> Tensor:
    """Return True for the rows past the last end."""
    return (group_of_rows(a.offsets, len(a.x)) == len(a.weight))[:, None]


def without_rows(a: SimpleNamespace) -> Tensor:
    """Return True for the groups without rows."""
    return torch.bincount(group_of_rows(a.offsets, len(a.x)), minlength=len(a.weight) + 1)[:-1] == 0


def starts(offsets: Tensor) -> Tensor:
    """Return the starts of the groups."""
    return torch.cat((offsets.new_zeros(1), offsets[:-1]))[: len(offsets)]


@wrong("rows past the last end are not written", GROUPED, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run().masked_fill(tail(a), 7e20 if a.x.dtype is not torch.float16 else 6e4)


@wrong("rows past the last end are of the last group", GROUPED, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(offsets=torch.cat((a.offsets[:-1], torch.full_like(a.offsets[-1:], len(a.x)))))


@wrong("rows past the last end have the bias of the last group", GROUPED, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.bias is None or not len(a.bias):
        return run()
    return run().where(~tail(a), a.bias[-1].to(a.x.dtype))


@wrong("groups end a row early", GROUPED, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(offsets=(a.offsets - 1).clamp(min=0))


@wrong("offsets are the starts of the groups", GROUPED, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(offsets=starts(a.offsets))


@wrong("offsets are the sizes of the groups", GROUPED, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(offsets=a.offsets.cumsum(0))


@wrong("int64 offsets are read as int32", GROUPED, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.offsets.dtype is torch.int32:
        return run()
    return run(offsets=a.offsets.contiguous().view(torch.int32)[: len(a.offsets)].cummax(0).values)


@wrong("a group without rows moves the weights of the next ones", GROUPED, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    order = without_rows(a).long().argsort(stable=True)  # the groups with rows first
    return run(weight=a.weight[order.argsort()], bias=None if a.bias is None else a.bias[order.argsort()])


@wrong("the bias of a group is that of the first one", GROUPED, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(bias=None if a.bias is None else a.bias[:1].expand(a.bias.shape))


@wrong("x is rounded to bfloat16", GROUPED, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(x=a.x.bfloat16().to(a.x.dtype))


@wrong("the gradient of rows past the last end is not written", GROUPED, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, *rest = run()
    return (None if dx is None else dx.masked_fill(tail(a), 1e3), *rest)


@wrong("the gradient of rows past the last end is of the last group", GROUPED, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    _, *rest = run()
    return (run(offsets=torch.cat((a.offsets[:-1], torch.full_like(a.offsets[-1:], len(a.x)))))[0], *rest)


@wrong("the gradient of the weight of a group without rows is not written", GROUPED, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dweight, dbias = run()
    return dx, None if dweight is None else dweight.masked_fill(without_rows(a)[:, None, None], 1e3), dbias


@wrong("the gradient of the bias of a group without rows is not written", GROUPED, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dweight, dbias = run()
    return dx, dweight, None if dbias is None else dbias.masked_fill(without_rows(a)[:, None], 1e3)


@wrong("the gradient of the last bias has the rows past the last end", GROUPED, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dweight, _ = run()
    return dx, dweight, run(offsets=torch.cat((a.offsets[:-1], torch.full_like(a.offsets[-1:], len(a.x)))))[2]


@wrong("the gradient of the bias is that of all rows", GROUPED, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dweight, dbias = run()
    return dx, dweight, None if dbias is None else a.grad.sum(0).expand(dbias.shape).to(dbias.dtype).contiguous()


@wrong("the gradient of a weight lacks the first row of its group", GROUPED, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, _, dbias = run()
    first = torch.zeros(len(a.x) + 1, dtype=torch.bool).index_fill(0, starts(a.offsets).long(), True)[:-1]
    return dx, run(x=a.x.masked_fill(first[:, None], 0.0))[1], dbias


@wrong("the gradient of a transposed weight is not transposed", GROUPED, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dweight, dbias = run()
    square = dweight is not None and dweight.shape[1] == dweight.shape[2] and a.transposed
    return dx, dweight.mT.contiguous() if square else dweight, dbias
