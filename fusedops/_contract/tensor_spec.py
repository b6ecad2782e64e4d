"""TensorSpec: the metadata of a tensor that selection needs, without the tensor, its device or a vendor's library."""

from __future__ import annotations

import operator
from functools import cache
from math import prod
from typing import Any

import torch

from fusedops.errors import InvalidInputError


class TensorSpec:
    """Shape, dtype and device of a tensor that need not exist, for :func:`fusedops.explain`.

    Args:
        shape: sizes.
        dtype: element type.
        device: a device in torch's notation, "cuda", "npu:0", ...; this machine need not have one.
        capability: compute capability of that device, where a kernel's constraints depend on it; None is "any".

    >>> import torch, fusedops
    >>> print(fusedops.TensorSpec((8, 16, 512, 512), torch.bfloat16, "npu"))
    bfloat16[8, 16, 512, 512] on npu
    """

    __slots__ = ("capability", "device", "dtype", "shape")

    layout = torch.strided  # attributes that ops read; a spec is always strided
    is_nested = False

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        capability: tuple[int, int] | None = None,
    ) -> None:
        try:
            sizes = tuple(map(operator.index, shape))
        except TypeError:
            raise InvalidInputError(
                f"TensorSpec: got shape {shape!r}, expected sizes; to fix: write them like (8, 16, 512, 512)"
            ) from None
        if not isinstance(dtype, torch.dtype):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidInputError(
                f"TensorSpec: got dtype {dtype!r}, expected a torch.dtype; to fix: use torch.float32"
            )
        if not isinstance(device, (str, torch.device)) or not str(device):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidInputError(
                f"TensorSpec: got device {device!r}, expected a device; to fix: write it like 'npu:0'"
            )
        if sizes and min(sizes) < 0:
            raise InvalidInputError(
                f"TensorSpec: got shape {sizes}, expected sizes of at least 0; to fix: give the tensor's real shape"
            )
        self.shape = sizes
        self.dtype = dtype
        self.device = str(device)
        self.capability = capability

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """Return the spec of a real, meta or fake tensor."""
        return TensorSpec(tuple(tensor.shape), tensor.dtype, str(tensor.device), capability_of(tensor))

    def replace(self, **changes: Any) -> TensorSpec:
        """Return a copy with some of shape, dtype, device and capability changed."""
        fields: dict[str, Any] = {"shape": self.shape, "dtype": self.dtype, "device": self.device}
        fields["capability"] = self.capability
        return TensorSpec(**{**fields, **changes})

    @property
    def device_type(self) -> str:
        """The device without its index: "cuda" of "cuda:1"."""
        return self.device.partition(":")[0]

    def dim(self) -> int:
        """Return the number of dimensions. This and the next members have the names that tensors use."""
        return len(self.shape)

    def numel(self) -> int:
        return prod(self.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return self.numel() * self.dtype.itemsize

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorSpec) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self.shape, self.dtype, self.device, self.capability

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, self.shape))}] on {self.device}"

    def __repr__(self) -> str:
        capability = "" if self.capability is None else f", capability={self.capability}"
        return f"TensorSpec({self.shape}, {self.dtype}, {self.device!r}{capability})"


def capability_of(tensor: Any) -> tuple[int, int] | None:
    """Return the compute capability of a tensor's device, or None where the device type has none."""
    if isinstance(tensor, TensorSpec):
        return tensor.capability
    return _device_capability(tensor.get_device()) if tensor.is_cuda else None


@cache  # one entry a device
def _device_capability(index: int) -> tuple[int, int] | None:
    # a fake tensor may be on cuda although this machine has no such device
    return torch.cuda.get_device_capability(index) if torch.cuda.is_available() else None


def on_meta(arg: Any) -> Any:
    """Return a tensor or a spec as a tensor without memory, anything else as it is."""
    if hasattr(arg, "shape") and hasattr(arg, "dtype"):
        return torch.empty(tuple(arg.shape), dtype=arg.dtype, device="meta")
    return arg
