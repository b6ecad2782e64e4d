"""Viewless tensors: a tensor that shares a view's storage without keeping the viewed tensor alive.

A view holds a reference to the tensor that it views (``_base``), even after its ``.data`` was replaced. In a pipeline
that frees activations through ``.data``, each view leaks one activation. Viewless means exactly ``t._base is None``. A
viewless tensor can be non-contiguous and can share its storage.

Storage cannot be shared under torch.compile and torch.export, whose graphs are functional (the compiler removes the
copy if possible), under torch.func transforms and under forward-mode differentiation. There, the result is a copy:
writing into it does not change the input.

Source: Megatron-LM, ``megatron/core/utils.py``.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fusedops._torch import is_transformed

T = TypeVar("T")


class MakeViewlessTensor(torch.autograd.Function):
    """The autograd Function that creates a viewless tensor in the autograd graph.

    Use :func:`make_viewless_tensor` instead of calling it directly.

    >>> y = MakeViewlessTensor.apply(torch.ones(2, 3, requires_grad=True).view(6), True)
    >>> y.shape, y.requires_grad, y._base
    (torch.Size([6]), True, None)
    """

    @staticmethod
    def forward(ctx: Any, inp: Tensor, requires_grad: bool) -> Tensor:
        """Return a viewless tensor with the storage of ``inp``.

        Args:
            ctx: autograd's context; nothing is saved in it.
            inp: any shape, dtype and device.
            requires_grad: not used; for compatibility with the original. The result requires grad if ``inp`` does.

        Returns:
            The shape, strides, dtype and storage of ``inp``, with a version counter of its own.
        """
        # torch.compile traces forward and ignores apply below; through .data it would lose the gradient
        return inp.clone() if torch.compiler.is_compiling() else _share_storage(inp)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient of the output as the gradient of ``inp``."""
        return grad_output, None

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Tensor:
        """Call the Function. Under torch.func and forward-mode differentiation, which do not support it, copy."""
        return args[0].clone() if _must_copy() else cast("Tensor", super().apply(*args, **kwargs))


def make_viewless_tensor(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
    """Return a tensor with the data of ``inp`` and no ``_base``. It is a copy only under torch.compile and torch.func.

    Args:
        inp: any shape, dtype and device. A tensor that is not a view is returned unchanged, and the other arguments are
            ignored.
        requires_grad: the result requires grad. Used only if ``keep_graph`` is False.
        keep_graph: True keeps the result in the autograd graph; it then requires grad if ``inp`` does. False returns a
            leaf.

    Returns:
        The shape, strides and dtype of ``inp``, on its storage, with a version counter of its own.

    Raises:
        RuntimeError: raised by torch if ``requires_grad`` is True and the dtype does not support gradients. Also if a
            new leaf that requires grad is requested under torch.func or torch.compile(fullgraph=True), which do not
            support it.

    >>> x = torch.zeros(2, 3)
    >>> y = make_viewless_tensor(x.view(6), requires_grad=False, keep_graph=True)
    >>> y._base is None, y.data_ptr() == x.data_ptr()
    (True, True)
    """
    if inp._base is None:
        return inp
    if _must_copy():
        copy = inp.clone() if keep_graph else inp.detach().clone()
        return copy.requires_grad_() if requires_grad and not keep_graph else copy
    if keep_graph:
        return MakeViewlessTensor.apply(inp, requires_grad)
    return _share_storage(inp).requires_grad_(requires_grad)


def assert_viewless_tensor(tensor: T, extra_msg: str | None = None) -> T:
    """Check that a tensor, or each item of a list, is not a view.

    Args:
        tensor: a tensor, or a list whose items are checked. Other objects are not checked.
        extra_msg: text that is added to the error message.

    Returns:
        ``tensor`` itself.

    Raises:
        AssertionError: a tensor is a view. It is raised with ``python -O`` too.

    >>> assert_viewless_tensor(torch.zeros(2))
    tensor([0., 0.])
    """
    value: Any = tensor
    if isinstance(value, list):
        for item in cast("list[Any]", value):
            assert_viewless_tensor(item, extra_msg)
    elif isinstance(value, Tensor) and value._base is not None:
        extra = "" if extra_msg is None else f" {extra_msg}"
        raise AssertionError(
            f"got a view of shape {tuple(value.shape)} of a tensor of shape {tuple(value._base.shape)}, expected a "
            f"tensor whose _base is None, because a view keeps the viewed tensor in memory; to fix: use "
            f"make_viewless_tensor.{extra}"
        )
    return tensor


def safely_set_viewless_tensor_data(tensor: Tensor, new_data_tensor: Tensor) -> None:
    """Set ``tensor.data``, which frees the previous data, after a check that ``tensor`` is not a view.

    Args:
        tensor: any tensor that is not a view.
        new_data_tensor: the new data: any shape, the dtype of ``tensor``.

    Raises:
        AssertionError: ``tensor`` is a view.

    >>> x = torch.zeros(4)
    >>> safely_set_viewless_tensor_data(x, torch.ones(1))
    >>> x
    tensor([1.])
    """
    assert_viewless_tensor(tensor, extra_msg=f"The new data has shape {tuple(new_data_tensor.shape)}.")
    tensor.data = new_data_tensor


def _must_copy() -> bool:
    """Return True if the call is traced or transformed, so that storage cannot be shared."""
    return torch.compiler.is_compiling() or is_transformed()


def _share_storage(inp: Tensor) -> Tensor:
    """Return a viewless tensor with the storage of ``inp``. ``detach()`` would also share the version counter."""
    return inp.data
