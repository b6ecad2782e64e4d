"""The shapes and dtypes of a call's outputs and saved values, cached.

On tensors without memory torch's shape functions are Python, and take milliseconds; on zeros they take a tenth of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.tensor_spec import TensorSpec, on_meta

_MOST = 2**16  # elements of a call that has memory
_CACHED = 2**12  # calls


def empty_outputs(op: Op, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return tensors without memory of the outputs' shapes and dtypes. Specs among the arguments are accepted."""
    return _outputs_of_forms(op, tuple(map(_form, args)))


def empty_saved(op: Op, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return tensors without memory of the saved values' shapes and dtypes. Specs among the arguments are accepted."""
    return _saved_of_forms(op, tuple(map(_form, args))) if op.saved else ()


_Form = tuple[Any, Any]  # of a tensor its shape and dtype, of another argument its type and itself


def _form(arg: object) -> _Form:
    if isinstance(arg, (Tensor, TensorSpec)):
        return tuple(arg.shape), arg.dtype
    # 1, 1.0 and True are equal; a list, such as attention's window, is no key
    return type(arg), tuple(cast("list[Any]", arg)) if isinstance(arg, list) else arg


@lru_cache(maxsize=_CACHED)
def _outputs_of_forms(op: Op, forms: tuple[_Form, ...]) -> tuple[Tensor, ...]:
    return tuple(map(on_meta, op.as_tuple(op.empty(*_zeros(forms)))))


@lru_cache(maxsize=_CACHED)
def _saved_of_forms(op: Op, forms: tuple[_Form, ...]) -> tuple[Tensor, ...]:
    values = _zeros(forms)
    with torch.no_grad():
        outputs = [torch.zeros_like(y) for y in op.as_tuple(op.empty(*values))]
        return tuple(map(on_meta, op.saved_references(values, outputs)))


def _zeros(forms: tuple[_Form, ...]) -> list[Any]:
    """Return arguments of these forms: without memory where a call at the edge of a constraint needs too much."""
    elements = sum(prod(kind) for kind, _ in forms if not isinstance(kind, type))
    device = "cpu" if elements <= _MOST else "meta"
    return [value if isinstance(kind, type) else torch.zeros(kind, dtype=value, device=device) for kind, value in forms]
