"""The dtypes of numbers in memory, and of the arithmetic: one declaration of each, for all that reads or rounds them.

Every op computes in float32, or in float64 for float64, and rounds its result once. Constraints, references, kernels,
tolerances, the conformance kit and the command line read ``STORAGE``. Kernels of a plugin may import these names too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fusedops._named_tuple import NamedTuple
from fusedops._torch import autocasts

__all__ = [
    "CODES",
    "STORAGE",
    "Storage",
    "arithmetic",
    "compute_dtype",
    "is_narrow",
    "no_autocast",
    "promoted",
    "upcast",
]


class Storage(NamedTuple):
    """A dtype in which tensors of numbers are stored.

    Args:
        dtype: of torch.
        arithmetic: the dtype in which numbers of it are computed.
        short: shorter names, as the command line takes them.
        flushed: True where numbers below the normal ones are 0 in the products of some processors.

    >>> import torch, fusedops
    >>> half = fusedops.dtypes.STORAGE[torch.float16]
    >>> half.name, half.dtype.itemsize, half.arithmetic, half.rounding == 2.0**-10, half.smallest_step == 2.0**-24
    ('float16', 2, torch.float32, True, True)
    """

    dtype: torch.dtype
    arithmetic: torch.dtype
    short: tuple[str, ...] = ()
    flushed: bool = False

    @property
    def name(self) -> str:
        """The name, without ``torch.``."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def rounding(self) -> float:
        """The distance of 1 from the next number: rounding to the dtype changes a number by at most half of it."""
        return torch.finfo(self.dtype).eps

    @property
    def smallest_step(self) -> float:
        """By how much a number may be off once it is rounded to the dtype, however small it is."""
        return torch.finfo(self.dtype).smallest_normal * (1.0 if self.flushed else self.rounding)


#: By dtype of torch.
STORAGE = {
    each.dtype: each
    for each in (
        Storage(torch.float16, torch.float32, ("fp16", "f16", "half")),
        Storage(torch.bfloat16, torch.float32, ("bf16",), flushed=True),
        Storage(torch.float32, torch.float32, ("fp32", "f32", "float")),
        Storage(torch.float64, torch.float64, ("fp64", "f64", "double")),
    )
}
#: Of codes of 8 bits in a cache, numbers that a scale multiplies.
CODES = (torch.int8, torch.float8_e4m3fn)


def is_narrow(dtype: torch.dtype) -> bool:
    """Return True for a dtype whose numbers are computed in a wider one.

    >>> import torch, fusedops
    >>> fusedops.dtypes.is_narrow(torch.bfloat16), fusedops.dtypes.is_narrow(torch.float32)
    (True, False)
    """
    storage = STORAGE.get(dtype)
    return storage is not None and storage.arithmetic is not dtype


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of ``dtype`` are computed: float32, or float64 for float64.

    >>> import torch, fusedops
    >>> fusedops.dtypes.compute_dtype(torch.bfloat16)
    torch.float32
    """
    storage = STORAGE.get(dtype)
    return torch.promote_types(dtype, torch.float32) if storage is None else storage.arithmetic


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
