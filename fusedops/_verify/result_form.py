"""The form of a kernel's results: number, type, dtype, shape, strides and device, as the op's contract gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.tensor_spec import on_meta
from fusedops._report.direction import Direction

_TIMES, _ROUNDING = 4, 4096  # so many times its elements, and bytes, a result may hold: padded rows, both halves of two
OWN_KIND = "a plain tensor that holds no memory but its own"


class ResultForm(NamedTuple):
    """The form of one result.

    Attributes:
        name: "output y", "saved rstd" or "gradient of x".
        like: a tensor without memory of its shape and dtype; None where the kernel returns None, or its result is not
            used.
        optional: True where a kernel may return None in its place.
        permuted: True where its dims may have another order in memory.
    """

    name: str
    like: Tensor | None
    optional: bool = False
    permuted: bool = False


def empty_outputs(op: Op, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return tensors without memory of the outputs' shapes and dtypes. Specs among the arguments are accepted."""
    return op.as_tuple(op.empty(*(on_meta(arg) for arg in args)))


def result_forms(op: Op, direction: Direction, args: Sequence[Any]) -> list[ResultForm]:
    """Return the forms of what a kernel returns for these arguments, in its order.

    Args:
        op: the op.
        direction: forward or backward.
        args: as the kernel gets them: of forward with ``save`` where the op has saved values.
    """
    if direction == "backward":
        gradients = op.backward(*map(on_meta, args))
        names = [f"gradient of {name}" for name in op.differentiable]
        return [ResultForm(name, like, permuted=True) for name, like in zip(names, as_tuple(gradients))]
    given = args[: len(op.parameters)]
    outputs = empty_outputs(op, given)
    forms = [
        ResultForm(f"output {name}", like, permuted=name in op.permuted) for name, like in zip(op.outputs, outputs)
    ]
    saved: list[Any] = [None] * len(op.saved)
    if op.saved and args[-1]:
        saved = op.saved_references([on_meta(arg) for arg in given], outputs)
    not_wanted = [name for name, arg in zip(op.parameters, given) if not getattr(arg, "requires_grad", False)]
    return forms + [
        ResultForm(f"saved {value.name}", like, value.optional or like is None or value.gradient_of in not_wanted)
        for value, like in zip(op.saved, saved)
    ]


def as_tuple(results: Any) -> tuple[Any, ...]:
    """Return the results of a kernel as a tuple, also a single one."""
    return cast("tuple[Any, ...]", results) if isinstance(results, tuple) else (results,)


def wrong_forms(
    forms: Sequence[ResultForm], results: Any, several: bool, device: torch.device
) -> list[tuple[str, str]]:
    """Return the name of each result that has another form, and the difference as text.

    Args:
        forms: from :func:`result_forms`.
        results: what the kernel returned.
        several: True where it must be a tuple, also of one.
        device: of the call.
    """
    if several != isinstance(results, tuple) or len(as_tuple(results)) != len(forms):
        needed = f"a tuple of {len(forms)}" if several else "a Tensor"
        return [(forms[0].name, f"as {_kind(results)}, expected {needed}")]
    wrong: list[tuple[str, str]] = []
    for form, result in zip(forms, as_tuple(results)):
        text = _wrong_form(form, result, device)
        if text:
            wrong.append((form.name, text))
    return wrong


def _wrong_form(form: ResultForm, result: Any, device: torch.device) -> str:
    like = form.like
    if like is None or (result is None and form.optional):
        is_extra = isinstance(result, Tensor) and form.name.startswith("saved")
        return "as a Tensor, expected None: no gradient is wanted" if is_extra and like is None else ""
    if not isinstance(result, Tensor):
        return f"as {_kind(result)}, expected a Tensor"
    if result.dtype is not like.dtype:
        return f"of dtype {_dtype(result)}, expected {_dtype(like)}"
    if result.shape != like.shape:
        return f"of shape {tuple(result.shape)}, expected {tuple(like.shape)}"
    if result.device != device:
        return f"on {result.device}, expected {device}"
    if result.layout is not torch.strided:
        return f"of layout {result.layout}, expected torch.strided"
    if not (is_dense(result) if form.permuted else result.is_contiguous()):
        needed = "without gaps, in any order" if form.permuted else f"{like.contiguous().stride()}, as it is contiguous"
        return f"with strides {tuple(result.stride())}, expected {needed}"
    kind = odd_kind(result)
    return f"as {kind}, expected {OWN_KIND}" if kind else ""


def odd_kind(result: Tensor) -> str:
    """Return what a result is besides a plain tensor, as text, or an empty one.

    Its shape, dtype and strides show none of it, and it fails or costs memory long after the call.

    >>> import torch
    >>> odd_kind(torch.ones(2)), odd_kind(torch.ones(2000)[:2]), odd_kind(torch.nn.Parameter(torch.ones(2)))
    ('', 'a view of 8000 bytes', 'a Parameter')
    """
    if type(result) is not Tensor:
        return f"a {type(result).__name__}"
    if result.is_neg() or result.is_conj():
        return "a negative or conjugate view"
    if result.is_inference() and not torch.is_inference_mode_enabled():
        return "an inference tensor"
    if result.requires_grad and result.is_leaf:
        return "a leaf that requires a gradient"
    size = result.untyped_storage().nbytes()
    if size > _TIMES * result.numel() * result.itemsize + _ROUNDING:
        return f"a view of {size} bytes"
    return ""


def is_dense(tensor: Tensor) -> bool:
    """Return True where the elements are in one piece of memory, in any order of the dims.

    >>> import torch
    >>> is_dense(torch.ones(2, 3).T), is_dense(torch.ones(2, 3)[:, :2])
    (True, False)
    """
    order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), -tensor.shape[dim]))
    return tensor.is_contiguous() or tensor.permute(order).is_contiguous()


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(cast('tuple[object, ...]', value))}"
    return "None" if value is None else f"a {type(value).__name__}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
