"""Logits that are not made: what a model's head returns in a training step with ``fused_loss=True``.

The tensor has the shape and dtype of the logits and no memory. It keeps the input of the head. What models do between
head and loss (casts, views of rows, scaling, a softcap) is recorded, and a cross entropy is computed by
:func:`fusedops.linear_cross_entropy`. Any other use makes the logits, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from fusedops import ops
from fusedops._report.user_frame import user_stack_level
from fusedops._torch import autocasts, tree_map_only, without_torch_function, wrapper_subclass
from fusedops.errors import FusedOpsWarning, InvalidInputError

_FIX = "use the loss alone, or evaluate with model.eval(), or leave fused_loss out of apply"
# what is asked of a tensor without its numbers
_METADATA: set[Any] = (
    {
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "grad_fn", "layout", "is_cuda")
    }
    | {
        getattr(Tensor, name)
        for name in (
            "size",
            "dim",
            "ndimension",
            "numel",
            "nelement",
            "is_floating_point",
            "is_complex",
            "is_contiguous",
        )
    }
    | {Tensor.element_size, Tensor.get_device, Tensor.__len__, torch.is_floating_point, torch.numel}
)


@dataclass(frozen=True)
class Source:
    """The input of a head and what follows it, from which logits are computed.

    Attributes:
        head: the linear layer.
        own: its own forward.
        x: (..., H), its input.
        steps: what was done to the logits: (name, value) for "mul", "div", "add", "tanh" and "to".
        versions: of its tensors at the time of the forward, with the tensors.
        autocast: the dtype of autocast, or None.
    """

    head: Any
    own: Callable[..., Tensor]
    x: Tensor
    steps: tuple[tuple[str, Any], ...]
    versions: tuple[tuple[Tensor, int], ...]
    autocast: torch.dtype | None

    @classmethod
    def of(cls, head: Any, own: Callable[..., Tensor], x: Tensor) -> Source:
        """Return the source of the logits of a head."""
        tensors = [each for each in (x, head.weight, head.bias) if each is not None]
        dtype = torch.get_autocast_dtype(x.device.type) if autocasts(x.device.type) else None
        return cls(head, own, x, (), tuple((each, each._version) for each in tensors), dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the logits."""
        casts = [value for name, value in self.steps if name == "to"]
        return casts[-1] if casts else self.autocast or self.x.dtype

    @property
    def rows(self) -> tuple[int, ...]:
        """Return the leading dims of the logits."""
        return tuple(self.x.shape[:-1])

    def and_then(self, name: str, value: Any = None) -> Source:
        """Return the source after one more step."""
        return replace(self, steps=(*self.steps, (name, value)))

    def readings(self) -> tuple[float, Tensor | None, float | None] | None:
        """Return s, b and c of ``c * tanh((s * x @ weight.T + b) / c)``, c None without tanh, or None for another."""
        bias = self.head.bias if self.autocast is None or self.head.bias is None else self.head.bias.to(self.autocast)
        scale, capped, tanhs = 1.0, 1.0, 0
        for name, value in self.steps:
            if name == "to":
                continue
            if name == "tanh" or (name == "add" and tanhs):
                tanhs += 1
            elif name == "add":
                bias = value if bias is None else bias + value
            else:
                factor = value if name == "mul" else 1 / value
                if tanhs:
                    capped *= factor
                else:
                    scale, bias = scale * factor, None if bias is None else bias * factor
        if tanhs == 0:
            return scale, bias, None
        if tanhs > 1 or capped <= 0:
            return None
        return scale * capped, None if bias is None else bias * capped, capped

    def loss(self, target: Tensor, **options: Any) -> Tensor | None:
        """Return the cross entropy of the logits, (N, V), or None where the op computes another function."""
        readings = self.readings()
        if readings is None:
            return None
        scale, bias, softcap = readings
        x, weight = self.x, self.head.weight
        if self.autocast is not None:  # as autocast casts what a linear layer is given
            x, weight = x.to(self.autocast), weight.to(self.autocast)
        if scale != 1:
            x = x * scale
        return ops.linear_cross_entropy(x, weight, target.to(x.device), bias, softcap=softcap, **options)

    def check(self) -> None:
        """Raise InvalidInputError where the weight is another one than in the forward."""
        now = [self.x, self.head.weight, *([] if self.head.bias is None else [self.head.bias])]
        before = [each for each, _ in self.versions]
        changed = any(one is not other for one, other in zip(now[1:], before[1:]))
        if changed or any(each._version != version for each, version in self.versions[1:]):
            raise InvalidInputError(
                "fused_loss: got a use of a training step's logits after a change of the head's weight, expected one "
                f"before it, since they are made from the weight on their first use; to fix: {_FIX}"
            )

    def logits(self) -> Tensor:
        """Compute the logits."""
        with torch.autocast(self.x.device.type, self.autocast, enabled=self.autocast is not None):
            y = self.own(self.head, self.x)
        for name, value in self.steps:
            if name == "to":
                y = y.to(value)
            elif name == "tanh":
                y = torch.tanh(y)
            elif name == "add":
                y = y + value
            else:
                y = y * value if name == "mul" else y / value
        return y


class DeferredLogits(Tensor):
    """Logits (..., V) that are made when they are used, other than by a loss."""

    source: Source
    _made: Tensor | None

    @staticmethod
    def __new__(cls: type[DeferredLogits], source: Source) -> DeferredLogits:
        """Return logits that are not made."""
        shape = (*source.rows, source.head.weight.shape[0])
        logits = cast("DeferredLogits", wrapper_subclass(cls, shape, source.dtype, source.x.device))
        logits.source = source
        logits._made = None
        return logits

    def made(self, user: str) -> Tensor:
        """Return the logits, with a warning the first time. ``user`` is the name of what uses them."""
        if self._made is None:
            self.source.check()
            warnings.warn(
                f"fused_loss: got a use of the logits of a training step (by {user}), expected one of the loss alone; "
                f"they are made now, {tuple(self.shape)} of {self.dtype}; to fix: {_FIX}",
                FusedOpsWarning,
                stacklevel=user_stack_level("transformers"),
            )
            self._made = self.source.logits()
        return self._made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the shape and dtype; the numbers do not exist."""
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, made on their first use)"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with without_torch_function():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        first = args[0] if args else kwargs.get("input")
        if handler is not None and isinstance(first, DeferredLogits) and first._made is None:
            result = handler(first, *args[1:], **{name: value for name, value in kwargs.items() if name != "input"})
            if result is not None:
                return DeferredLogits(result) if isinstance(result, Source) else result
        args, kwargs = _made((args, kwargs), getattr(func, "__name__", str(func)))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _made((args, kwargs or {}), str(func))
        return func(*args, **kwargs)


def _made(values: Any, user: str) -> Any:
    """Return arguments in which logits are made."""
    return tree_map_only(DeferredLogits, lambda logits: logits.made(user), values)


# ------------------------------------------- what is recorded: a handler returns None for a call that it does not take


def _scaled(name: str) -> Callable[..., Source | None]:
    def handler(logits: DeferredLogits, other: Any) -> Source | None:
        usable = isinstance(other, (int, float)) and not isinstance(other, bool) and other != 0
        return logits.source.and_then(name, float(other)) if usable else None

    return handler


def _added(logits: DeferredLogits, other: Any, *, alpha: float = 1) -> Source | None:
    """Take a bias: one number for each class."""
    if not isinstance(other, Tensor) or alpha != 1 or other.shape[-1:] != logits.shape[-1:]:
        return None
    if other.numel() != logits.shape[-1] or other.dim() > logits.dim() or other.dtype != logits.dtype:
        return None
    return logits.source.and_then("add", other.reshape(-1))


def _tanh(logits: DeferredLogits) -> Source:
    return logits.source.and_then("tanh")


def _same(logits: DeferredLogits) -> Source:
    return logits.source


def _float(logits: DeferredLogits) -> Source:
    return logits.source.and_then("to", torch.float32)


def _to(logits: DeferredLogits, *args: Any, **kwargs: Any) -> Source | None:
    values = [*args, *(value for name, value in kwargs.items() if name in ("dtype", "device", "other"))]
    values = [value for value in values if not isinstance(value, bool) and value is not None]
    dtypes = [each.dtype if isinstance(each, Tensor) else each for each in values]
    devices = [each.device if isinstance(each, Tensor) else each for each in values]
    if any(not isinstance(each, torch.dtype) and torch.device(each) != logits.device for each in devices):
        return None
    cast_to = [each for each in dtypes if isinstance(each, torch.dtype)]
    if any(not each.is_floating_point for each in cast_to):
        return None
    return logits.source.and_then("to", cast_to[0]) if cast_to else logits.source


def _index(logits: DeferredLogits, index: Any) -> Source | None:
    """Take an index of rows: slices, numbers, or one mask."""
    x, rank = logits.source.x, logits.dim()
    if isinstance(index, Tensor):
        return replace(logits.source, x=x[index]) if index.dtype == torch.bool and index.dim() < rank else None
    parts: list[Any] = list(cast("tuple[Any, ...]", index)) if isinstance(index, tuple) else [index]
    if not all(isinstance(part, (slice, int)) or part is Ellipsis for part in parts):
        return None
    if Ellipsis in parts:
        position = parts.index(Ellipsis)
        parts[position : position + 1] = [slice(None)] * (rank - len(parts) + 1)
    if len(parts) == rank and parts.pop() != slice(None):
        return None
    return replace(logits.source, x=x[tuple(parts)])


def _viewed(logits: DeferredLogits, *shape: Any) -> Source | None:
    sizes: tuple[Any, ...] = (
        tuple(cast("Any", shape[0])) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    )
    if len(sizes) < 1 or not all(isinstance(size, int) for size in sizes):
        return None
    vocabulary, rows = logits.shape[-1], logits.numel() // logits.shape[-1]
    if sizes[-1] not in (vocabulary, -1) or (sizes[-1] == -1 and _product(sizes[:-1]) != rows):
        return None
    return replace(logits.source, x=logits.source.x.reshape(*sizes[:-1], logits.source.x.shape[-1]))


def _product(sizes: tuple[int, ...]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _flattened(logits: DeferredLogits, start_dim: int = 0, end_dim: int = -1) -> Source | None:
    rank = logits.dim()
    if end_dim % rank == rank - 1:
        return None
    return replace(logits.source, x=logits.source.x.flatten(start_dim % rank, end_dim % rank))


def _cross_entropy(
    logits: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    plain = weight is None and size_average is None and reduce is None
    if not plain or logits.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        return None
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    loss = logits.source.loss(target, **options)
    return None if loss is None else loss.to(logits.dtype)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.cross_entropy: _cross_entropy,
    torch.add: _added,
    Tensor.add: _added,
    Tensor.__add__: _added,
    torch.tanh: _tanh,
    Tensor.tanh: _tanh,
    Tensor.float: _float,
    Tensor.to: _to,
    Tensor.contiguous: _same,
    Tensor.__getitem__: _index,
    Tensor.view: _viewed,
    Tensor.reshape: _viewed,
    torch.reshape: _viewed,
    Tensor.flatten: _flattened,
    torch.flatten: _flattened,
} | {
    getattr(owner, name): _scaled("mul" if "mul" in name else "div")
    for owner, names in (
        (torch, ("mul", "div")),
        (Tensor, ("mul", "div", "__mul__", "__rmul__", "__truediv__", "__div__")),
    )
    for name in names
}
