"""The dtypes of the arithmetic: one declaration of each rule, for references, kernels and error bounds.

Every op computes in float32, or in float64 for float64, and rounds its result once. Kernels of a plugin may import
these functions as well.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fusedops._torch import autocasts

__all__ = ["arithmetic", "compute_dtype", "no_autocast", "promoted", "upcast"]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of ``dtype`` are computed: float32, or float64 for float64.

    >>> import torch, fusedops
    >>> fusedops.dtypes.compute_dtype(torch.bfloat16)
    torch.float32
    """
    return torch.promote_types(dtype, torch.float32)


def arithmetic(first: Any, *others: Any) -> torch.dtype:
    """Return the dtype in which tensors are computed together: float32, or float64 where one has it; None is left out.

    >>> import torch, fusedops
    >>> fusedops.dtypes.arithmetic(torch.ones(2, dtype=torch.bfloat16), None, torch.ones(2, dtype=torch.float64))
    torch.float64
    """
    dtype = first.dtype
    for other in others:
        if other is not None:
            dtype = torch.promote_types(dtype, other.dtype)
    return compute_dtype(dtype)


def promoted(one: Any, other: Any) -> torch.dtype:
    """Return the dtype of ``one + other``, by torch's promotion of tensors that have dims; ``other`` may be None.

    >>> import torch, fusedops
    >>> fusedops.dtypes.promoted(torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float16))
    torch.float32
    """
    return one.dtype if other is None else torch.promote_types(one.dtype, other.dtype)


def upcast(tensor: Tensor) -> Tensor:
    """Return the tensor in its :func:`compute_dtype`: itself if it has that dtype.

    >>> import torch, fusedops
    >>> fusedops.dtypes.upcast(torch.ones(2, dtype=torch.float16))
    tensor([1., 1.])
    """
    return tensor.to(compute_dtype(tensor.dtype))


def no_autocast(device_type: str) -> AbstractContextManager[object]:
    """Return a context without autocast, which would round the operands of a product of float32 to 16 bits.

    >>> import torch, fusedops
    >>> with torch.autocast("cpu"), fusedops.dtypes.no_autocast("cpu"):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.float32
    """
    if autocasts(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
