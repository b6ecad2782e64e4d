"""Wrong kernels that leave elements as new memory has them, or read it, for the list in ``wrong_kernels``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from wrong_grouped_kernels import tail, without_rows
from wrong_kernels import Run, wrong


def _left_out(result: Tensor, where: Tensor) -> Tensor:
    """Return a result in new memory, of which some elements are not written."""
    where = where.expand(result.shape)
    new = torch.empty_like(result)
    new[~where] = result[~where]
    return new


def _last_column(result: Tensor) -> Tensor:
    """Return True for the last column of an odd number of them."""
    size = result.shape[-1]
    return (torch.arange(size) == size - 1) & torch.tensor(size % 2 == 1)


for _op in ("rms_norm", "swiglu", "scaled_masked_softmax"):

    @wrong("the last of an odd number of columns is as it was", _op, "forward", "written")
    def _(run: Run, a: SimpleNamespace) -> Any:
        results = run()
        first, *rest = results if isinstance(results, tuple) else (results,)
        first = _left_out(first, _last_column(first))
        return (first, *rest) if isinstance(results, tuple) else first


@wrong("the gradient of the weight is added to what the memory has", "rms_norm", "backward", "written")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dweight = run()
    return dx, None if dweight is None else torch.empty_like(dweight).add_(dweight)


@wrong("the gradient of a query that sees no key is as it was", "attention", "backward", "written")
def _(run: Run, a: SimpleNamespace) -> Any:
    dq, *rest = run()
    return (None if dq is None else _left_out(dq, (dq == 0).all(-1, keepdim=True)), *rest)


@wrong("rows past the last end are as they were", "grouped_matmul", "forward", "written")
def _(run: Run, a: SimpleNamespace) -> Any:
    return _left_out(run(), tail(a))


@wrong("the gradient of the weight of a group without rows is as it was", "grouped_matmul", "backward", "written")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dweight, dbias = run()
    return dx, None if dweight is None else _left_out(dweight, without_rows(a)[:, None, None]), dbias


@wrong("the indices past the first block of rows are as they were", "top_k_routing", "forward", "written")
def _(run: Run, a: SimpleNamespace) -> Any:
    weights, indices, *rest = run()
    rows = torch.arange(indices.shape[0]).view(-1, *[1] * (indices.dim() - 1))
    return (weights, _left_out(indices, rows >= 64), *rest)


@wrong("the output is another one where all of a new buffer is NaN", "bias_gelu", "forward", "written")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() + a.x.new_empty(2**12).isnan().all()
