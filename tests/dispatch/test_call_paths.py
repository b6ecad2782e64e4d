"""Paths of a call through torch that tests/integrations/test_pytorch_*.py do not take with every op."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from ascend import ascend
from softmax_calls import MASK, OP, SCALE, G, X, calls, close, numbers, softmax, torch_op, want
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedops import InvalidInputError


class Seen(TorchDispatchMode):
    """Note the ops that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", [softmax, torch_op], ids=["fusedops", "torch.ops"])
def test_fake_tensors_run_nothing(way: Any, fakes: Any) -> None:
    fakes("fast")
    with FakeTensorMode() as mode:
        x = mode.from_tensor(numbers(2, 5, 7, dtype=torch.bfloat16).transpose(0, 1)).requires_grad_()
        y = way(x, mode.from_tensor(torch.zeros(1, 7, dtype=torch.bool)), 0.5)
        assert (y.shape, y.dtype, y.device.type) == ((5, 2, 7), torch.bfloat16, "cpu")
        assert y.is_contiguous()
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
        cuda = way(torch.empty(2, 4, device="cuda"))
        assert cuda.device.type == "cuda"
        with pytest.raises(InvalidInputError, match="expected a shape that broadcasts to x"):
            way(x, torch.zeros(3, 3, dtype=torch.bool))
    assert fakes.ran == []


def test_in_a_dispatch_mode_one_op_is_seen() -> None:
    x = X.clone().requires_grad_()
    with Seen() as seen:
        y = softmax(x, MASK, SCALE, causal=True)
    assert seen.names[0].startswith("fusedops.scaled_masked_softmax")
    y.backward(G)
    for got, wanted in zip((y.detach(), x.grad), want(MASK, SCALE, True)):
        assert got is not None
        close(got, wanted)


def test_a_subclass_with_torch_dispatch() -> None:
    two = TwoTensor(X.clone(), 2 * X).requires_grad_()
    y = softmax(two, TwoTensor(MASK, MASK), SCALE, causal=True)
    assert isinstance(y, TwoTensor)
    y.backward(TwoTensor(G, G))
    assert isinstance(two.grad, TwoTensor)
    for part, factor in (("a", 1), ("b", 2)):
        found = [getattr(each, part).detach() for each in (y, two.grad)]
        for got, wanted in zip(found, want(MASK, SCALE, True, factor * X)):
            close(got, wanted)
    alone = softmax(X, TwoTensor(MASK, MASK), SCALE)
    assert isinstance(alone, TwoTensor), "the mask may be the only one"
    close(alone.a, want(MASK, SCALE, False)[0])


@calls
@pytest.mark.parametrize("size", [(5, 7), (90, 91)], ids=["small", "large"])  # large: more than one slab may need
def test_a_default_device_does_not_reach_in(size: tuple[int, int], mask: Any, scale: float, causal: bool) -> None:
    x = numbers(2, 3, *size, dtype=torch.bfloat16)
    mask = None if mask is None else numbers(2, 1, *size, seed=1) > 0.5

    def results() -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y = softmax(leaf, mask, scale, causal=causal)
        return [y.detach(), *torch.autograd.grad(y.sum(), leaf)]

    wanted = results()
    with torch.device("meta"):
        assert all(map(torch.equal, results(), wanted))
    torch.set_default_device("meta")
    try:
        assert all(map(torch.equal, results(), wanted))
    finally:
        torch.set_default_device(None)


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
