"""Gradients of scaled_masked_softmax: by every path, saved tensors, parts that are not wanted."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from ascend import ascend
from softmax_calls import MASK, OP, SCALE, G, X, calls, close, numbers, softmax, torch_op, want
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck


@calls
@pytest.mark.parametrize("way", [softmax, torch_op, OP.reference], ids=["fusedops", "torch.ops", "reference"])
def test_gradcheck_and_gradgradcheck(way: Any, mask: Any, scale: float, causal: bool) -> None:
    x = X[:1, :2, 1:4, :4].clone().requires_grad_()
    mask = None if mask is None else mask[:1, :, 1:4, :4]
    function = OP.call_public if way is softmax else way

    def f(x: Tensor) -> Tensor:
        return function(x, mask, scale, causal)

    assert gradcheck(f, (x,))
    assert gradgradcheck(f, (x,))


@calls
def test_the_reference_backward_is_the_derivative_of_the_reference(mask: Any, scale: float, causal: bool) -> None:
    y, dx = want(mask, scale, causal)
    close(OP.backward(*OP.backward_arguments([G], [y], (X, mask, scale, causal), (True,))), dx)


SAMPLES = [
    (X, MASK, SCALE, True),
    (X.transpose(0, 1), None, 1.0, False),
    (X.float().requires_grad_(), MASK, SCALE, False),
    (numbers(0, 5), None, 1.0, False),
    (numbers(5, 0), None, 1.0, False),
    (numbers(4, 4, dtype=torch.bfloat16).requires_grad_(), torch.zeros(4, dtype=torch.uint8), 2, True),
]


@pytest.mark.parametrize("args", SAMPLES, ids=["all", "strided", "grad", "no rows", "no columns", "low"])
def test_opcheck(args: Any) -> None:
    low = args[0].dtype == torch.bfloat16
    torch.library.opcheck(torch_op.default, args, atol=1e-2 if low else None, rtol=1e-2 if low else None)
    y = softmax(*args[:3], causal=args[3]).detach()
    grad = torch.randn_like(y).mT.contiguous().mT  # strides of its own
    backward = OP.backward_arguments([grad.requires_grad_(args[0].requires_grad)], [y], args, (True,))
    torch.library.opcheck(
        torch.ops.fusedops.scaled_masked_softmax_backward.default,
        backward,
        atol=1e-2 if low else None,
        rtol=1e-2 if low else None,
    )


@pytest.mark.parametrize("way", [softmax, torch_op], ids=["fusedops", "torch.ops"])
def test_a_saved_tensor_changed_in_place_is_torchs_error(way: Any) -> None:
    y = way(X.clone().requires_grad_(), MASK, SCALE)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(G)


@pytest.mark.parametrize("way", [softmax, torch_op], ids=["fusedops", "torch.ops"])
def test_the_graph_is_kept_and_freed_as_torch_does(way: Any) -> None:
    x = X.clone().requires_grad_()
    y = way(x, MASK, SCALE)
    y.backward(G, retain_graph=True)
    y.backward(G)
    assert x.grad is not None
    close(x.grad, 2 * want(MASK, SCALE, False)[1])
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(G)


@pytest.mark.parametrize("way", [softmax, torch_op], ids=["fusedops", "torch.ops"])
def test_inputs_are_not_kept_for_backward(way: Any) -> None:
    base = X.clone().requires_grad_()
    x, mask = base * 1.0, MASK.clone()
    y = way(x, mask, SCALE)
    known = weakref.ref(x), weakref.ref(mask)
    del x, mask
    gc.collect()
    assert [ref() for ref in known] == [None, None], "only y is needed: x and the mask are freed"
    y.backward(G)
    assert base.grad is not None
    close(base.grad, want(MASK, SCALE, False)[1])


@pytest.mark.parametrize("way", [softmax, torch_op], ids=["fusedops", "torch.ops"])
def test_the_registered_op_serves_a_device_of_another_vendor(way: Any) -> None:
    # registered for the CPU and CUDA keys alone, it would not know npu tensors (PrivateUse1)
    with ascend() as torch_npu:
        x = numbers(1, 2, 32, 64, dtype=torch.float32).to("npu").requires_grad_()
        y = way(x, None, SCALE)
        y.backward(torch.ones_like(y))
        assert y.device.type == "npu"
        assert torch_npu.calls, "served by the npu backend"
    assert x.grad is not None
    torch.testing.assert_close(
        y.detach().cpu(), OP.reference(x.detach().cpu(), None, SCALE, False), atol=2e-6, rtol=1e-5
    )


def test_a_gradient_is_made_only_where_wanted() -> None:
    assert not softmax(X).requires_grad
    assert softmax(X.clone().requires_grad_()).requires_grad
    assert not softmax(X.clone().requires_grad_()).detach().requires_grad
    with torch.no_grad():
        assert not softmax(X.clone().requires_grad_()).requires_grad


def test_a_part_of_the_gradient_may_be_missing() -> None:
    x = X.clone().requires_grad_()
    softmax(x, MASK)[..., 0].sum().backward()
    softmax(x * 1.0)[:0].sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_activation_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    x = X.clone().requires_grad_()
    checkpoint(lambda x: softmax(x, MASK, SCALE), x, use_reentrant=False).backward(G)
    assert x.grad is not None
    close(x.grad, want(MASK, SCALE, False)[1])


def test_saved_tensor_hooks_are_seen() -> None:
    packed: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        softmax(X.clone().requires_grad_(), MASK, SCALE)
    assert packed == [X.shape]
