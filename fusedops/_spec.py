"""TensorSpec: what choosing needs to know of a tensor, without the tensor, its device or its vendor's library."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch

from fusedops.errors import InvalidInputError


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and device of a tensor that need not exist, for :func:`fusedops.explain`.

    Args:
        shape: sizes.
        dtype: element type.
        device: a device as torch writes it, "cuda", "npu:0", ...; the machine need not have one.
        capability: compute capability of that device, where a kernel's limits depend on it; None is "any".
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    capability: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        try:
            sizes = tuple(int(size) for size in self.shape)
        except (TypeError, ValueError):
            raise InvalidInputError(
                f"TensorSpec shape is {self.shape!r}; needs sizes; give them as in (8, 16, 512, 512)"
            ) from None
        if any(size < 0 for size in sizes):
            raise InvalidInputError(
                f"TensorSpec shape is {sizes}; needs sizes of at least 0; give the tensor's real shape"
            )
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "device", str(self.device))

    layout = torch.strided  # as on a tensor: a spec is of no other kind, which the ops refuse
    is_nested = False

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """The spec of a real, meta or fake tensor."""
        return TensorSpec(tuple(tensor.shape), tensor.dtype, str(tensor.device), capability_of(tensor))

    @property
    def device_type(self) -> str:
        """The device without its index: "cuda" of "cuda:1"."""
        return self.device.partition(":")[0]

    def dim(self) -> int:
        """Number of dimensions, named as on a tensor, as are the next three."""
        return len(self.shape)

    def numel(self) -> int:
        return prod(self.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def get_device(self) -> int:
        index = self.device.partition(":")[2]
        return -1 if self.device_type in ("cpu", "meta") else int(index or 0)

    @property
    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, self.shape))}] on {self.device}"


def capability_of(tensor: Any) -> tuple[int, int] | None:
    """Compute capability of a tensor's device, or None where the device type has none."""
    if isinstance(tensor, TensorSpec):
        return tensor.capability
    return _capability(tensor.get_device()) if tensor.is_cuda else None


@cache  # one entry a device
def _capability(index: int) -> tuple[int, int] | None:
    # a fake tensor may say cuda on a machine that has none
    return torch.cuda.get_device_capability(index) if torch.cuda.is_available() else None
