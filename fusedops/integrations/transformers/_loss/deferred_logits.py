"""Logits that are not made: what a model's head returns in a training step with ``fused_loss=True``.

The tensor has the shape, dtype and gradient of the logits and no memory. To autograd it is a tensor like any other,
with views, versions and hooks, and torch asks for the numbers in ``__torch_dispatch__``. A few functions, in
``logit_steps``, give another such tensor. A cross entropy is computed by :func:`fusedops.linear_cross_entropy`, from
the tensors that the head had in forward. Any other function makes the logits, with a warning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from fusedops import ops
from fusedops._report.user_frame import user_stack_level
from fusedops._torch import (
    TENSOR_TYPES,
    autocasts,
    graph_is_kept,
    is_traced,
    is_transformed,
    tree_map_only,
    without_torch_function,
    wrapper_subclass,
)
from fusedops.dtypes import no_autocast
from fusedops.errors import FusedOpsWarning, InvalidInputError
from fusedops.integrations.transformers._loss.head_call import FIX, HeadCall
from fusedops.integrations.transformers._loss.logit_steps import Step, readings, step_after

_aten: Any = torch.ops.aten
_tensor: Any = Tensor


class DeferredLogits(Tensor):
    """Logits (..., V) that are made when they are used, other than by a loss."""

    source: HeadCall
    steps: tuple[Step, ...]
    like: Tensor  # on the meta device
    _viewed: DeferredLogits | None
    _made: Tensor | None

    @staticmethod
    def __new__(
        cls: type[DeferredLogits],
        source: HeadCall,
        like: Tensor,
        steps: tuple[Step, ...] = (),
        viewed: DeferredLogits | None = None,
    ) -> DeferredLogits:
        """Return logits that are not made, with the geometry and dtype of ``like``, a view of ``viewed`` or of none."""
        layout = like.shape, like.stride(), int(like.storage_offset())
        logits = cast("DeferredLogits", wrapper_subclass(cls, like.dtype, source.x.device, *layout))
        logits.source, logits.steps = source, steps
        logits.like, logits._viewed = like, viewed
        logits._made = None
        return logits

    def is_deferred(self) -> bool:
        """Return True where neither these logits nor those they are a view of are made."""
        return self._made is None and (self._viewed is None or self._viewed.is_deferred())

    def made(self, user: str) -> Tensor:
        """Return the numbers, with a warning the first time. ``user`` is the name of what uses them."""
        if self._made is None and self._viewed is not None:
            with torch.inference_mode(False), torch.no_grad():
                self._made = self.steps[-1].call(self._viewed.made(user))
        elif self._made is None:  # not from the numbers of others: those may have changed in place since
            self._made = self.numbers(user)
        return self._made

    def numbers(self, user: str) -> Tensor:
        """Compute the numbers from the head's tensors."""
        with torch.inference_mode(False), torch.no_grad(), no_autocast(self.device.type):
            numbers = self.source.logits()
            for step in self.steps:
                numbers = step.call(numbers)
        if not self.source.warned:
            self.source.warned = True
            warnings.warn(
                f"fused_loss: got a use of the logits of a training step (by {user}), expected one of the loss alone; "
                f"they are made now, {tuple(self.shape)} of {self.dtype}; to fix: {FIX}",
                FusedOpsWarning,
                stacklevel=user_stack_level("transformers"),
            )
        return numbers

    def plain(self, user: str) -> Tensor:
        """Return a plain tensor that shares the memory and the gradient of the logits."""
        self.made(user)
        return _aten.alias.default(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the shape and dtype where the numbers do not exist."""
        if not self.is_deferred():
            return repr(self.plain("repr"))
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, made on their first use)"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.cross_entropy:
            loss = _cross_entropy(*args, **kwargs)
            if loss is not None:
                return loss
        with without_torch_function():
            if func == _tensor.data.__set__:
                raise _replaced("a new data")
            if func in _WATCHERS:
                tree_map_only(DeferredLogits, _watch, (args, kwargs))
            elif func in _MEMORY:
                name = func.__name__
                args, kwargs = tree_map_only(DeferredLogits, lambda logits: logits.plain(name), (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        deferred = _after(func, args, kwargs)
        if deferred is not None:
            return deferred
        name = func.overloadpacket.__name__
        if torch.Tag.inplace_view in func.tags:
            raise _replaced(name)
        args, kwargs = tree_map_only(DeferredLogits, lambda logits: logits.made(name), (args, kwargs))
        return func(*args, **kwargs)


def _replaced(name: str) -> InvalidInputError:
    return InvalidInputError(
        f"fused_loss: got {name} for the logits of a training step, which replaces their shape or memory in place, "
        f"expected a new tensor; to fix: {FIX}"
    )


def _watch(logits: DeferredLogits) -> DeferredLogits:
    logits.source.watched = True
    return logits


# functions that ask for the gradient of logits, now or later
_WATCHERS: set[Any] = {
    Tensor.register_hook,
    Tensor.retain_grad,
    _tensor.grad_fn.__get__,
    torch.autograd.grad,
    torch.autograd.backward,
}
# functions that read the memory of a tensor, past torch's dispatcher
_MEMORY: set[Any] = {
    getattr(Tensor, name)
    for name in (
        "__array__",
        "__deepcopy__",
        "__dlpack__",
        "__reduce_ex__",
        "data_ptr",
        "numpy",
        "share_memory_",
        "storage",
        "tolist",
        "untyped_storage",
    )
}


# ------------------------------------------------------------------------------------------------------- the gradients


class _Linear(torch.autograd.Function):
    """The head: logits that are not made, with the gradients of a linear layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, source: HeadCall) -> Tensor:
        ctx.set_materialize_grads(False)  # a fused loss has no gradient for the logits
        # what torch's linear keeps: the rest may change before backward
        ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)
        shape, dtype = (*x.shape[:-1], weight.shape[0]), source.autocast or x.dtype
        ctx.dtypes = dtype, x.dtype, weight.dtype, None if bias is None else bias.dtype
        return DeferredLogits(source, torch.empty(shape, dtype=dtype, device="meta"))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if grad is None:
            return None, None, None, None
        (x, weight), (dtype, *dtypes), needs = ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        dx = (grad @ weight.to(dtype)).to(dtypes[0]) if needs[0] else None
        dweight = (rows.t() @ x.to(dtype).reshape(-1, x.shape[-1])).to(dtypes[1]) if needs[1] else None
        return dx, dweight, rows.sum(0).to(dtypes[2]) if needs[2] else None, None


class _Loss(torch.autograd.Function):
    """A fused loss. Its gradient goes to the tensors of the head, or to the logits where theirs is asked for."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, logits: DeferredLogits, target: Tensor, again: Callable[..., Tensor]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(target)
        ctx.rest = logits, logits._version, again
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad,), rest = grads, ctx.rest
        if not graph_is_kept():
            ctx.rest = None
        if grad is None or rest is None or not rest[0].source.watched:
            return grad, None, None, None  # a second backward is an error of the op's
        logits, version, again = rest
        create_graph, (target,) = torch.is_grad_enabled(), ctx.saved_tensors
        numbers = logits.numbers("its gradient")  # not those that the logits have now
        with torch.enable_grad():
            if not create_graph:
                numbers.requires_grad_()
            elif logits._version == version:
                numbers = cast("Any", _Same).apply(logits, numbers)
            else:
                raise RuntimeError(
                    "fused_loss: got a second gradient of a loss whose logits were modified in place, expected them as "
                    f"in the loss; to fix: {FIX}"
                )
            loss = again(numbers, target)
        return None, *torch.autograd.grad(loss, (numbers,), grad, create_graph=create_graph), None, None


class _Same(torch.autograd.Function):
    """The numbers of logits, whose gradient is that of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, numbers: Tensor) -> Tensor:
        return numbers.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


def deferred_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + bias``, not made. The dtypes are those that torch's linear takes."""
    dtype = torch.get_autocast_dtype(x.device.type) if autocasts(x.device.type) else None
    return cast("Any", _Linear).apply(x, weight, bias, HeadCall(x, weight, bias, dtype))


# ------------------------------------------------------------------------------------------------- what stays deferred


def _after(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DeferredLogits | None:
    """Return the logits after a call of a function of torch, not made, or None where the call makes them."""
    logits = args[0] if args else None
    if not isinstance(logits, DeferredLogits) or not logits.is_deferred():
        return None
    # autograd detaches a result that it keeps, in backward too. Without gradients others are made: among them is what
    # a Function of the user's returns
    if func is not _aten.detach.default and not (torch.is_grad_enabled() and _has_its_gradient(logits)):
        return None
    device, kwargs = kwargs.get("device"), {name: value for name, value in kwargs.items() if name != "device"}
    devices = {each.device for each in args if isinstance(each, Tensor)} | {device or logits.device}
    step = step_after(logits.like, func, args[1:], kwargs) if devices == {logits.device} else None
    like = None if step is None else step.call(logits.like)
    if step is None or like is None or like.shape[-1:] != logits.shape[-1:]:
        return None
    if step.name == "add":
        logits.source.keep(step.value)
    return DeferredLogits(logits.source, like, (*logits.steps, step), logits if step.view else None)


def _has_its_gradient(logits: DeferredLogits) -> bool:
    """Return True for logits that are not made, and whose gradient goes to the head's tensors."""
    needs = logits.source.requires_grad
    return logits.is_deferred() and logits.requires_grad == needs and logits.is_leaf != needs


# ------------------------------------------------------------------------------------------------------------ the loss


def fused_loss(
    logits: DeferredLogits, target: Tensor, again: Callable[[Tensor, Tensor], Tensor], **options: Any
) -> Tensor | None:
    """Return the cross entropy of logits (N, V), computed by the op, or None where the logits are to be made.

    Args:
        logits: the logits of a training step.
        target: (N,), the classes.
        again: computes the same loss from logits and target, where the gradient of the logits is asked for.
        options: of :func:`fusedops.linear_cross_entropy`.
    """
    source = logits.source
    if source.watched or not _has_its_gradient(logits) or is_traced() or is_transformed():
        return None
    source.check()
    try:
        with no_autocast(logits.device.type):
            x, weight, bias = source.operands()
            for step in logits.steps:
                x = x if step.rows is None else step.rows(x)
            read = readings(logits.steps, bias)
            if read is None:
                return None
            scale, bias, softcap = read
            if scale != 1:
                x = (x.float() if x.dtype == torch.float16 else x) * scale  # may be out of float16's range
            loss = ops.linear_cross_entropy(x, weight, target, bias, softcap=softcap, **options)
    except InvalidInputError:
        return None  # torch's function raises its own error
    return cast("Any", _Loss).apply(loss, logits, target, again)


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Compute torch.nn.functional.cross_entropy of deferred logits, or return None where they are to be made."""
    plain = weight is None and size_average is None and reduce is None and type(target) in TENSOR_TYPES
    if not plain or not isinstance(input, DeferredLogits) or input.dim() != 2 or target.shape != input.shape[:1]:
        return None
    if target.dtype != torch.int64 or target.device != input.device:
        return None
    narrow = input.dtype in (torch.float16, torch.bfloat16)
    dtype = torch.float32 if narrow and autocasts(input.device.type) else input.dtype
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
    }

    def again(logits: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.to(dtype), target, **options)

    loss = fused_loss(input, target, again, **options)
    if loss is None:
        return None
    if reduction == "mean":  # torch's is NaN without a class, the op's 0
        loss = loss.masked_fill((target == ignore_index).all(), math.nan)
    return loss.to(dtype)
