"""The shapes and dtypes of a call's saved values, cached: references on tensors without memory take milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._verify.result_form import empty_outputs


def empty_saved(op: Op, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return tensors without memory of the saved values' shapes and dtypes. Specs among the arguments are accepted."""
    return _of_forms(op, tuple(map(_form, args))) if op.saved else ()


def _form(arg: object) -> tuple[Any, Any]:
    if isinstance(arg, (Tensor, TensorSpec)):
        return tuple(arg.shape), arg.dtype
    return type(arg), arg  # 1, 1.0 and True are equal


@lru_cache(maxsize=512)
def _of_forms(op: Op, forms: tuple[tuple[Any, Any], ...]) -> tuple[Tensor, ...]:
    empty = [
        value if isinstance(kind, type) else torch.empty(kind, dtype=value, device="meta") for kind, value in forms
    ]
    with torch.no_grad():
        return tuple(op.saved_references(empty, empty_outputs(op, empty)))
