"""The weight of a packed layer for those who read it: shape, dtype and device without an unpack, numbers with one."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from fusedops._torch import tree_map_only, without_torch_function, wrapper_subclass
from fusedops.errors import InvalidInputError
from fusedops.quantization import SCALED, dequantize, weights_of_row
from fusedops.quantization._scaled import unpack_rows

UNPACK = "unpack the model first, by remove() of what quantize returned, or quantize(model, skip=['*']).remove()"
_GETTERS = "shape dtype device ndim requires_grad is_leaf grad grad_fn layout is_meta is_cuda"
_QUESTIONS = "size dim numel stride is_contiguous is_floating_point is_complex element_size __len__ __hash__"
_METADATA: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in _GETTERS.split()),
    *(getattr(Tensor, name) for name in _QUESTIONS.split()),
    torch.is_floating_point,
    torch.numel,
}
_OWN_DATA: set[Any] = {cast("Any", Tensor.data).__get__, Tensor.detach}  # such that a write to it is refused too
_IN_PLACE = {name for name in dir(Tensor) if name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}")}


class PackedWeight(Tensor):
    """A packed weight as a tensor (..., rows, columns) of the unpacked dtype that cannot be written.

    It counts as a ``Parameter``, so that ``lm_head.weight = embedding.weight`` ties two packed layers. Every operation
    on it gets the numbers, which are unpacked for it.

    Attributes:
        packed: uint8, (..., rows, bytes of a row), the parameter of the layer.
        format: of the bytes.
        parts: the tensors beside them, by the names of a ``Packed``.
        transposed: the tensor is (..., columns, rows).
    """

    packed: Parameter
    format: str
    parts: dict[str, Tensor]
    transposed: bool

    @classmethod
    def of(
        cls, packed: Parameter, format: str, dtype: torch.dtype, parts: dict[str, Tensor], transposed: bool = False
    ) -> PackedWeight:
        """Return the weight of packed bytes."""
        *lead, rows, size = packed.shape
        sizes = (rows, weights_of_row(size, format))
        shape = (*lead, *(sizes[::-1] if transposed else sizes))
        weight = cast("PackedWeight", wrapper_subclass(cls, dtype, packed.device, shape))
        weight.packed, weight.format, weight.parts, weight.transposed = packed, format, parts, transposed
        setattr(weight, "_is_param", True)  # noqa: B010
        return weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with without_torch_function():
                return func(*args, **kwargs)
        if func in _OWN_DATA:
            return args[0]
        name: str = func.__name__.partition(".")[0]  # of an overload: add_.Tensor
        written = kwargs.get("out", args[0] if args else next(iter(kwargs.values()), None))
        if name == "__set__":
            name = func.__self__.__name__
            if isinstance(written, PackedWeight) and name in ("requires_grad", "grad") and not args[1]:
                return None
            writes = True
        elif name == "requires_grad_":
            if not (args[1] if len(args) > 1 else kwargs.get("requires_grad", True)):
                return args[0]
            writes = True
        else:
            in_place = name.endswith("_") and not name.endswith("__")
            writes = in_place or name == "__setitem__" or name in _IN_PLACE or "out" in kwargs
            writes = writes or kwargs.get("inplace") is True  # of torch.nn.functional.relu, for example
        if writes and _holds_one(written):
            raise refused_write(name)
        args, kwargs = _unpacked((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.__torch_function__(func, types, args, kwargs)


class NoGradient:
    """The ``requires_grad_`` of packed bytes, since torch's own error names neither the layer nor the fix.

    Args:
        packed: the bytes.
        name: that the layer has in its model.
    """

    def __init__(self, packed: Parameter | None, name: str) -> None:
        self._packed = (lambda: None) if packed is None else weakref.ref(packed)
        self._name = name

    def __call__(self, requires_grad: bool = True) -> Any:
        if requires_grad:
            raise InvalidInputError(
                f"got requires_grad = True for the packed weight of {self._name}, expected False, since packed bytes "
                f"have no gradient; to fix: leave it unpacked, quantize(model, skip=[{self._name!r}]), or {UNPACK}"
            )
        return self._packed()

    def __reduce__(self) -> Any:
        return NoGradient, (None, self._name)  # the layer gives its copy another one


def refused_write(name: str) -> InvalidInputError:
    """Return the error of a write to the weight of a packed layer."""
    return InvalidInputError(
        f"got {name} as a write to the weight of a packed layer, expected to read it alone; to fix: {UNPACK}"
    )


def _holds_one(values: Any) -> bool:
    many: list[Any] = list(cast("Any", values)) if isinstance(values, (list, tuple)) else [values]
    return any(isinstance(each, PackedWeight) for each in many)


def _unpacked(values: Any) -> Any:
    """Return arguments with the numbers of packed weights."""
    return tree_map_only(PackedWeight, _numbers, values)


def _numbers(weight: PackedWeight) -> Tensor:
    rows = unpacked_rows(weight.packed.detach(), weight.format, weight.dtype, weight.parts)
    return rows.mT if weight.transposed else rows


def unpacked_rows(packed: Tensor, format: str, dtype: torch.dtype, parts: Mapping[str, Tensor]) -> Tensor:
    """Return the weight of bytes and what is beside them, (..., N, K)."""
    if format not in SCALED:
        return dequantize(packed, format, dtype)
    return unpack_rows(format, packed, parts["scales"], parts.get("global_scale"), parts.get("zeros")).to(dtype)


def embedded(codes: Tensor, format: str, dtype: torch.dtype, parts: Mapping[str, Tensor], index: Tensor) -> Tensor:
    """Return rows of the weight, (..., K), from their codes (..., bytes of a row) and their index (...)."""
    rows = SCALED[format].rows
    of_rows = {
        name: part if name == "global_scale" or not rows else part[index // rows if rows > 1 else index].flatten(0, -2)
        for name, part in parts.items()
    }
    flat = codes.reshape(index.numel(), codes.shape[-1])
    parts_of_rows = of_rows["scales"], of_rows.get("global_scale"), of_rows.get("zeros")
    weight = unpack_rows(format, flat, *parts_of_rows, by_row=True).to(dtype)
    return weight.view(*index.shape, weight.shape[-1])
