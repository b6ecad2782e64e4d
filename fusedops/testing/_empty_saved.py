"""The shapes and dtypes of a call's saved values, cached."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._verify.result_form import empty_outputs

_MOST = 2**16  # elements of a call whose references are run on zeros


def empty_saved(op: Op, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return tensors without memory of the saved values' shapes and dtypes. Specs among the arguments are accepted."""
    return _of_forms(op, tuple(map(_form, args))) if op.saved else ()


def _form(arg: object) -> tuple[Any, Any]:
    if isinstance(arg, (Tensor, TensorSpec)):
        return tuple(arg.shape), arg.dtype
    return type(arg), arg  # 1, 1.0 and True are equal


@lru_cache(maxsize=512)
def _of_forms(op: Op, forms: tuple[tuple[Any, Any], ...]) -> tuple[Tensor, ...]:
    # A reference takes milliseconds on tensors without memory, where the shape functions of torch are Python, and a
    # tenth of that on zeros. A call at the edge of a constraint may have more elements than there is memory.
    elements = sum(prod(kind) for kind, _ in forms if not isinstance(kind, type))
    device = "cpu" if elements <= _MOST else "meta"
    values = [
        value if isinstance(kind, type) else torch.zeros(kind, dtype=value, device=device) for kind, value in forms
    ]
    outputs = [torch.zeros_like(y, device=device) for y in empty_outputs(op, values)]
    with torch.no_grad():
        return tuple(value.to("meta") for value in op.saved_references(values, outputs))
