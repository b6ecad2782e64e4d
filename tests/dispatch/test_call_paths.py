"""A call gives the same numbers by every path through torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from softmax_calls import (
    MASK,
    OP,
    SCALE,
    G,
    X,
    backend_that_counts,
    calls,
    close,
    counting_compilations,
    numbers,
    softmax,
    torch_op,
    want,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
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


class Labelled(Tensor):
    """A subclass by torch_function alone."""


WAYS: dict[str, Callable[..., Tensor]] = {
    "eager": lambda x, m, s, c: softmax(x, m, s, causal=c),
    "named": lambda x, m, s, c: softmax(x=x, mask=m, scale=s, causal=c, backend="eager"),
    "torch.ops": lambda x, m, s, c: torch_op(x, m, s, c),
    "parameter": lambda x, m, s, c: softmax(torch.nn.Parameter(x.detach()), m, s, causal=c),
    "labelled": lambda x, m, s, c: softmax(x.as_subclass(Labelled), m, s, causal=c).as_subclass(Tensor),
    "vmap": lambda x, m, s, c: (
        torch.vmap(lambda a: softmax(a, None if m is None else m[0], s, causal=c))(x)
        if m is None
        else torch.vmap(lambda a, b: softmax(a, b, s, causal=c))(x, m)
    ),
    "vmap of torch.ops": lambda x, m, s, c: (
        torch.vmap(lambda a: torch_op(a, None, s, c))(x)
        if m is None
        else torch.vmap(lambda a, b: torch_op(a, b, s, c))(x, m)
    ),
    "strided": lambda x, m, s, c: softmax(x.transpose(1, 2).contiguous().transpose(1, 2), m, s, causal=c),
    "uint8": lambda x, m, s, c: softmax(x, None if m is None else m.to(torch.uint8) * 3, s, causal=c),
}


@calls
@pytest.mark.parametrize("way", WAYS)
def test_the_same_numbers(way: str, mask: Any, scale: float, causal: bool) -> None:
    close(WAYS[way](X.clone(), mask, scale, causal).detach(), want(mask, scale, causal)[0])


@calls
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_in_one_graph(dynamic: bool, mask: Any, scale: float, causal: bool) -> None:
    with counting_compilations() as graphs:
        compiled = torch.compile(
            lambda x, m: softmax(x * 1.0, m, scale, causal=causal) * 1.0,
            fullgraph=True,
            dynamic=dynamic,
            backend=backend_that_counts(graphs),
        )
        x = X.clone().requires_grad_()
        y = compiled(x, mask)
        y.backward(G)
        assert len(graphs) == 1
        assert "fusedops.scaled_masked_softmax" in graphs[0].code
        for length in (4, 6, 9) if dynamic else ():
            again = numbers(2, 3, length, length, seed=length)
            close(compiled(again, None), OP.reference(again, None, scale, causal))
        assert len(graphs) <= (1 if not dynamic else 2 if mask is None else 3)
    for got, wanted in zip((y.detach(), x.grad), want(mask, scale, causal)):
        assert got is not None
        close(got, wanted)


def test_compiled_with_a_scale_that_changes() -> None:
    with counting_compilations() as graphs:
        compiled = torch.compile(
            lambda x, s: softmax(x, MASK, s), fullgraph=True, dynamic=True, backend=backend_that_counts(graphs)
        )
        for scale in (0.5, 0.25, 2.0):
            close(compiled(X, scale), want(MASK, scale, False)[0])


def test_exported() -> None:
    class Attention(torch.nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return softmax(x, mask, SCALE, causal=True)

    program = torch.export.export(Attention(), (X, MASK))
    assert any("fusedops.scaled_masked_softmax" in str(node.target) for node in program.graph.nodes)
    close(program.module()(X, MASK), want(MASK, SCALE, True)[0])


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


def test_meta_tensors_give_meta_tensors() -> None:
    y = softmax(torch.empty(2, 3, 4, device="meta"), torch.empty(1, 4, dtype=torch.bool, device="meta"), 0.5)
    assert (y.shape, y.device.type) == ((2, 3, 4), "meta")


@calls
def test_in_a_dispatch_mode_one_op_is_seen(mask: Any, scale: float, causal: bool) -> None:
    x = X.clone().requires_grad_()
    with Seen() as seen:
        y = softmax(x, mask, scale, causal=causal)
    assert seen.names[0].startswith("fusedops.scaled_masked_softmax")
    y.backward(G)
    for got, wanted in zip((y.detach(), x.grad), want(mask, scale, causal)):
        assert got is not None
        close(got, wanted)


@calls
def test_a_subclass_with_torch_dispatch(mask: Any, scale: float, causal: bool) -> None:
    two = TwoTensor(X.clone(), 2 * X).requires_grad_()
    y = softmax(two, mask, scale, causal=causal)
    assert isinstance(y, TwoTensor)
    close(y.a.detach(), want(mask, scale, causal)[0])
    close(y.b.detach(), want(mask, scale, causal, 2 * X)[0])
    y.backward(TwoTensor(G, G))
    assert isinstance(two.grad, TwoTensor)
    close(two.grad.a, want(mask, scale, causal)[1])
    close(two.grad.b, want(mask, scale, causal, 2 * X)[1])


def test_a_mask_that_is_a_subclass() -> None:
    y = softmax(X, TwoTensor(MASK, MASK), SCALE)
    assert isinstance(y, TwoTensor)
    close(y.a, want(MASK, SCALE, False)[0])


@calls
def test_functorch(mask: Any, scale: float, causal: bool) -> None:
    def f(x: Tensor) -> Tensor:
        return softmax(x, mask, scale, causal=causal)

    def reference(x: Tensor) -> Tensor:
        return OP.reference(x, mask, scale, causal)

    close(torch.func.grad(lambda x: (f(x) * G).sum())(X), want(mask, scale, causal)[1])
    close(torch.func.vjp(f, X)[1](G)[0], want(mask, scale, causal)[1])
    close(torch.func.jvp(f, (X,), (G,))[1], torch.func.jvp(reference, (X,), (G,))[1])
    small = X[:1, :1]
    if mask is None:
        close(torch.func.jacrev(f)(small), torch.func.jacfwd(reference)(small))
        close(
            torch.vmap(torch.func.grad(lambda x: f(x).square().sum()))(X),
            torch.func.grad(lambda x: reference(x).square().sum())(X),
        )
        hessian = torch.func.hessian(lambda x: f(x).square().sum())(small[0, 0, :2, :3])
        close(hessian, torch.func.hessian(lambda x: reference(x).square().sum())(small[0, 0, :2, :3]))


@pytest.mark.parametrize("way", [softmax, torch_op], ids=["fusedops", "torch.ops"])
def test_forward_mode(way: Any) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, G)
        y, tangent = forward_ad.unpack_dual(way(dual, MASK, SCALE))
    close(y, want(MASK, SCALE, False)[0])
    close(tangent, torch.func.jvp(lambda x: OP.reference(x, MASK, SCALE, False), (X,), (G,))[1])


@calls
def test_inference_mode_and_no_grad(mask: Any, scale: float, causal: bool) -> None:
    wanted = want(mask, scale, causal)[0]
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            y = softmax(X.clone().requires_grad_(), mask, scale, causal=causal)
            assert not y.requires_grad
            close(y, wanted)
            close(torch_op(X, mask, scale, causal), wanted)
    with torch.inference_mode():
        inside = X.clone()
    close(softmax(inside, mask, scale, causal=causal), wanted)


@calls
@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("size", [(5, 7), (90, 91)], ids=["small", "large"])  # large: more than one slab may need
def test_a_default_device_does_not_reach_in(
    size: tuple[int, int], device: str, mask: Any, scale: float, causal: bool
) -> None:
    x = numbers(2, 3, *size, dtype=torch.bfloat16)
    mask = None if mask is None else numbers(2, 1, *size, seed=1) > 0.5
    wanted = softmax(x, mask, scale, causal=causal)
    grown = x.clone().requires_grad_()
    softmax(grown, mask, scale, causal=causal).sum().backward()
    for context in (torch.device(device), default_device(device)):
        with context:
            got = x.clone().requires_grad_()
            y = softmax(got, mask, scale, causal=causal)
            y.sum().backward()
        assert torch.equal(y.detach(), wanted)
        assert got.grad is not None
        assert grown.grad is not None
        assert torch.equal(got.grad, grown.grad)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("way", [softmax, torch_op], ids=["fusedops", "torch.ops"])
def test_autocast_changes_nothing(way: Any) -> None:
    x = numbers(2, 5, 7, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        for arg in (x, x.float()):
            got = way(arg, None, SCALE)
            assert got.dtype == arg.dtype
    assert torch.equal(way(x, None, SCALE), softmax(x, None, SCALE))
