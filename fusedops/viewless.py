"""Viewless tensors: a tensor that shares a view's storage without keeping the viewed tensor alive.

A view holds a reference to the tensor it views (``_base``), also after its ``.data`` is set to something else; in a
pipeline that frees activations through ``.data``, each view leaks one. Viewless means exactly ``t._base is None``: it
says nothing of contiguity, or of who owns the storage.

Where there is no storage to share, a copy is the honest meaning: under torch.compile and torch.export, whose graphs are
functional (the compiler removes the copy where it can), and under torch.func transforms and forward-mode
differentiation. There, writing into the result does not reach the input.

Source: Megatron-LM, ``megatron/core/utils.py``.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms  # pyright: ignore[reportPrivateUsage]
from torch.autograd import forward_ad

T = TypeVar("T")


class MakeViewlessTensor(torch.autograd.Function):
    """Makes a viewless tensor that stays in the autograd graph. :func:`make_viewless_tensor` is the usual door."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, requires_grad: bool) -> Tensor:
        """Shares the storage of ``inp``.

        Args:
            ctx: autograd's context; nothing is kept in it.
            inp: any shape, dtype and device.
            requires_grad: for callers of the original; a result in the graph requires grad where ``inp`` does.

        Returns:
            The shape, strides, dtype and storage of ``inp``, with a version counter of its own.
        """
        # torch.compile traces forward itself and overlooks apply below; of .data it would lose the gradient
        return inp.clone() if torch.compiler.is_compiling() else _shared(inp)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradient of ``inp`` is the output's; ``requires_grad`` has none."""
        return grad_output, None

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Tensor:
        """``apply(inp, requires_grad)``, under torch.func and forward-mode differentiation too, which refuse ctx."""
        return args[0].clone() if _transformed() else cast("Tensor", super().apply(*args, **kwargs))


def make_viewless_tensor(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
    """A tensor with the data of ``inp`` and no ``_base``. Nothing is copied; under torch.compile and torch.func it is.

    Args:
        inp: any shape, dtype and device. One that is no view is returned as it is, whatever the other arguments.
        requires_grad: of the result where ``keep_graph`` is False.
        keep_graph: True keeps the result in the autograd graph; it then requires grad where ``inp`` does. False gives
            a leaf.

    Returns:
        The shape, strides and dtype of ``inp``, on its storage, with a version counter of its own.

    Raises:
        RuntimeError: torch's own, where ``requires_grad`` is True and the dtype has no gradients. And where a new leaf
            that requires grad is wanted under torch.func or torch.compile(fullgraph=True), which know no such thing.
    """
    if inp._base is None:
        return inp
    if _transformed():
        copy = inp.clone() if keep_graph else inp.detach().clone()
        return copy.requires_grad_() if requires_grad and not keep_graph else copy
    if keep_graph:
        return MakeViewlessTensor.apply(inp, requires_grad)
    return _shared(inp).requires_grad_(requires_grad)


def assert_viewless_tensor(tensor: T, extra_msg: str | None = None) -> T:
    """Checks that a tensor, or each item of a list, is no view.

    Args:
        tensor: a tensor; a list, whose items are checked one by one; anything else passes unchecked.
        extra_msg: added to the error's text.

    Returns:
        ``tensor`` itself.

    Raises:
        AssertionError: a tensor is a view. Raised, not asserted: ``python -O`` keeps it.
    """
    given: Any = tensor
    if isinstance(given, list):
        for item in cast("list[Any]", given):
            assert_viewless_tensor(item, extra_msg)
    elif isinstance(given, Tensor) and given._base is not None:
        more = "" if extra_msg is None else f" {extra_msg}"
        raise AssertionError(
            f"the tensor of shape {tuple(given.shape)} is a view of one of shape {tuple(given._base.shape)}; needs "
            f"_base to be None, or the viewed tensor stays in memory; use make_viewless_tensor.{more}"
        )
    return tensor


def safely_set_viewless_tensor_data(tensor: Tensor, new_data_tensor: Tensor) -> None:
    """Sets ``tensor.data``, which frees what it held, after checking that no viewed tensor would stay behind.

    Args:
        tensor: any, no view.
        new_data_tensor: what ``tensor`` shall hold: any shape, the dtype of ``tensor``.

    Raises:
        AssertionError: ``tensor`` is a view.
    """
    assert_viewless_tensor(tensor, extra_msg=f"The new data has shape {tuple(new_data_tensor.shape)}.")
    tensor.data = new_data_tensor


def _transformed() -> bool:
    """Whether the call is traced or transformed, so that no storage can be shared."""
    if torch.compiler.is_compiling() or transforms():
        return True
    return cast("int", forward_ad._current_level) >= 0  # pyright: ignore[reportPrivateUsage]


def _shared(inp: Tensor) -> Tensor:
    """The data of ``inp`` as a tensor of its own. Not by detach(): that shares the version counter too."""
    return inp.data
