"""Arguments and results of attention: defaults made explicit, and empty results."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fusedops._contract.constraint import is_tensor
from fusedops.dtypes import compute_dtype


def prepare_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with ``causal`` as a text: True where Sq == Sk is "upper_left", False is "none".

    "lower_right" of one query without a window is "none" too: it masks nothing, and more kernels accept it.
    """
    causal = args[5]
    if causal is True and _square(args[0], args[1]):
        text = "upper_left"
    elif causal is False or (type(causal) is str and causal == "lower_right" and _sees_every_key(args[0], args[6])):
        text = "none"
    else:
        return args  # a constraint refuses any other value
    return (*args[:5], text, *args[6:])


def wanted(results: Any, return_lse: bool) -> Any:
    """Return out, or (out, lse) with ``return_lse``. Under torch.fx.symbolic_trace the results are one proxy."""
    return results if return_lse or type(results) is not tuple else cast("Any", results)[0]


def _sees_every_key(q: Any, window: Any) -> bool:
    if window is not None or not is_tensor(q) or q.is_nested or q.dim() != 4:
        return False
    length: Any = q.shape[2]
    return isinstance(length, int) and length == 1  # a symbolic size, or one of torch.jit.trace, is any length


def _square(q: Any, k: Any) -> bool:
    if not (is_tensor(q) and is_tensor(k)) or q.is_nested or k.is_nested or q.dim() != 4 or k.dim() != 4:
        return False
    return bool(q.shape[2] == k.shape[2])


def empty(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return empty outputs: the dims of out in memory in the order of q's, where v is not wider."""
    lse = q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))
    size = v.shape[3]
    if size > q.shape[3]:
        return q.new_empty((*q.shape[:3], size)), lse
    return torch.empty_like(q[..., :size]), lse
