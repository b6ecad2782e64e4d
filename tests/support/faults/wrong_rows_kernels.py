"""Kernels whose results for a row depend on other rows, or on threads, for the list in ``wrong_kernels``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from wrong_kernels import Run, wrong


def _mean_square(x: Tensor, columns: int) -> Tensor:
    """Return the mean square of each row, summed in blocks of columns that are added in order."""
    blocks = [block.square().sum(-1, keepdim=True) for block in x.float().split(columns, -1)]
    return torch.stack(blocks).cumsum(0)[-1] / x.shape[-1]


def _norm(x: Tensor, weight: Tensor, mean_square: Tensor, eps: float) -> Tensor:
    return (x.float() * (mean_square + eps).rsqrt() * weight.float()).to(x.dtype)


@wrong("a row is summed in a part for each thread", "rms_norm", "forward", "rows")
def _(run: Run, a: SimpleNamespace) -> Any:
    part = -(-a.x.shape[-1] // torch.get_num_threads())
    return _norm(a.x, a.weight, _mean_square(a.x, part), a.eps), run()[1]


@wrong("the rows after the last eight are summed in another order", "rms_norm", "forward", "rows")
def _(run: Run, a: SimpleNamespace) -> Any:
    y, rstd = run()
    last = a.x[a.x.shape[0] // 8 * 8 :]
    square = last.float().square().cumsum(-1)[..., -1:] / a.x.shape[-1]
    return torch.cat([y[: a.x.shape[0] - last.shape[0]], _norm(last, a.weight, square, a.eps)]), rstd


@wrong("the block of a sum is selected by the number of rows", "add_rms_norm", "forward", "rows")
def _(run: Run, a: SimpleNamespace) -> Any:
    _, s, rstd = run()
    columns = 8 if s.shape[0] > 100 else 32
    return _norm(s, a.weight, _mean_square(s, columns), a.eps), s, rstd


@wrong("logits are taken from the largest of the batch, not of the row", "top_k_routing", "forward", "rows")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(logits=a.logits.float() - a.logits.float().max())


@wrong("few rows are computed in another precision", "layer_norm", "backward", "rows")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.x.shape[0] > 2:
        return run()
    dx, *sums = run(**{name: getattr(a, name).double() for name in ("grad", "x", "mean", "rstd")})
    return None if dx is None else dx.to(a.x.dtype), *sums
