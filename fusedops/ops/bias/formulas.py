"""The formula of the dropout ops: the sum of which elements are dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype


def summed(x: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
    """Return ``x + bias``, (...), in the dtype of the arithmetic.

    Args:
        x: (...).
        bias: broadcasts to x, or None.
        out: the dtype of the op's result, to which each term is rounded first.
    """
    wide = compute_dtype(out)
    u = x.to(out).to(wide)
    return u if bias is None else u + bias.to(out).to(wide)
