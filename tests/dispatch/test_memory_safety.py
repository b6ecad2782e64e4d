"""Tensors whose memory changes below a call: swapped, freed and held ones. No kernel reads what is not there."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops import InvalidInputError

H = 96
Swap = tuple[Callable[..., Any], list[tuple[int, ...]], int]

SWAPS: dict[str, Swap] = {
    "rms_norm x": (fusedops.rms_norm, [(8, H), (H,)], 0),
    "rms_norm weight": (fusedops.rms_norm, [(8, H), (H,)], 1),
    "layer_norm x": (fusedops.layer_norm, [(8, H), (H,), (H,)], 0),
    "layer_norm bias": (fusedops.layer_norm, [(8, H), (H,), (H,)], 2),
    "add_rms_norm weight": (fusedops.add_rms_norm, [(8, H), (8, H), (H,)], 2),
    "add_layer_norm weight": (fusedops.add_layer_norm, [(8, H), (8, H), (H,), (H,)], 2),
    "swiglu gate": (fusedops.swiglu, [(8, H), (8, H)], 0),
    "swiglu up": (fusedops.swiglu, [(8, H), (8, H)], 1),
    "geglu up": (fusedops.geglu, [(8, H), (8, H)], 1),
    "bias_gelu x": (fusedops.bias_gelu, [(8, H), (H,)], 0),
    "bias_gelu bias": (fusedops.bias_gelu, [(8, H), (H,)], 1),
    "attention k": (fusedops.attention, [(1, 2, 8, 16)] * 3, 1),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "one element": lambda x: x.new_empty(1),
    "more rows": lambda x: x.new_empty(2 * x.shape[0], *x.shape[1:]),
    "another dtype": lambda x: x.to(torch.bfloat16),
}


def swapped(swap: Swap, other: Callable[[Tensor], Tensor], call: Callable[..., Any] | None = None) -> None:
    function, shapes, which = swap
    used = [torch.randn(shape, requires_grad=True) * 1 for shape in shapes]
    y = (call or function)(*used)
    y = y[0] if isinstance(y, tuple) else y
    used[which].data = other(used[which].detach())
    torch.autograd.grad(y, used, torch.randn_like(y), allow_unused=True)


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("swap", SWAPS.values(), ids=SWAPS)
def test_a_saved_tensor_with_other_sizes_is_refused(
    swap: Swap, other: Callable[[Tensor], Tensor], backend: str
) -> None:
    with fusedops.use(f"{backend},auto", fallback="silent"):
        for _ in range(4):  # the third call is like a recent one, and the fourth saves what the third did
            with pytest.raises(InvalidInputError, match="as in forward"):
                swapped(swap, other)


@pytest.mark.parametrize("swap", SWAPS.values(), ids=SWAPS)
def test_a_registered_op_refuses_it_too(swap: Swap) -> None:
    registered = getattr(torch.ops.fusedops, swap[0].__name__)
    with pytest.raises((InvalidInputError, RuntimeError)):
        swapped(swap, OTHERS["one element"], registered)


def test_a_second_derivative_refuses_it_too() -> None:
    x, weight = torch.randn(4, H, requires_grad=True), torch.randn(H, requires_grad=True) * 1
    y = fusedops.rms_norm(x, weight)
    weight.data = torch.empty(1)
    with pytest.raises(InvalidInputError, match=r"got weight of shape \(1,\), float32, on cpu, expected \(96,\)"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_memory_of_the_same_sizes_is_used() -> None:
    x, weight = torch.randn(4, H), torch.randn(H)
    used = x.clone().requires_grad_()
    y = fusedops.rms_norm(used, weight)
    used.data = x.t().contiguous().t()  # the same values in other memory, with other strides
    want = x.clone().requires_grad_()
    fusedops.rms_norm(want, weight).sum().backward()
    y.sum().backward()
    torch.testing.assert_close(used.grad, want.grad)


def freed(x: Tensor) -> Tensor:
    x = x.clone(memory_format=torch.preserve_format)
    x.untyped_storage().resize_(0)
    return x


X, W, R = torch.randn(4, 8), torch.randn(8), torch.randn(4, 8)
TARGET = torch.tensor([0, 1, 2, 3])
Q = torch.randn(1, 1, 4, 8)
FREED: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "softmax x": (lambda t: fusedops.scaled_masked_softmax(t), X),
    "softmax mask": (lambda t: fusedops.scaled_masked_softmax(X, t), X < 0),
    "softmax transposed mask": (lambda t: fusedops.scaled_masked_softmax(X, t), (X < 0).t().contiguous().t()),
    "rms_norm weight": (lambda t: fusedops.rms_norm(X, t), W),
    "layer_norm weight": (lambda t: fusedops.layer_norm(X, t), W),
    "layer_norm bias": (lambda t: fusedops.layer_norm(X, W, t), W),
    "add_rms_norm residual": (lambda t: fusedops.add_rms_norm(X, t, W), R),
    "add_layer_norm bias": (lambda t: fusedops.add_layer_norm(X, R, W, t), W),
    "bias_gelu bias": (lambda t: fusedops.bias_gelu(X, t), W),
    "bias_dropout bias": (lambda t: fusedops.bias_dropout(X, t, 0.5, seed=1), W),
    "bias_dropout seed": (lambda t: fusedops.bias_dropout(X, W, 0.5, seed=t), torch.tensor([1])),
    "bias_dropout seed, p 0": (lambda t: fusedops.bias_dropout(X, None, 0.0, seed=t), torch.tensor([1])),
    "bias_dropout seed, eval": (
        lambda t: fusedops.bias_dropout(X, W, 0.5, training=False, seed=t),
        torch.tensor([1]),
    ),
    "bias_dropout_add residual": (lambda t: fusedops.bias_dropout_add(X, W, t, 0.5, seed=1), R),
    "bias_dropout_add seed": (lambda t: fusedops.bias_dropout_add(X, W, R, 0.5, seed=t), torch.tensor([1])),
    "swiglu up": (lambda t: fusedops.swiglu(X, t), R),
    "geglu up": (lambda t: fusedops.geglu(X, t), R),
    "rotary k": (lambda t: fusedops.rotary_embedding(Q, t, X[:, :4], X[:, :4]), Q),
    "rotary cos": (lambda t: fusedops.rotary_embedding(Q, Q, t, X[:, :4]), X[:, :4].contiguous()),
    "rotary sin with a head dim": (
        lambda t: fusedops.rotary_embedding(Q, Q, X[:, :4].view(1, 1, 4, 4), t),
        X[:, :4].contiguous().view(1, 1, 4, 4),
    ),
    "cross_entropy target": (lambda t: fusedops.cross_entropy(X, t), TARGET),
    "cross_entropy denominator": (lambda t: fusedops.cross_entropy(X, TARGET, denominator=t), torch.tensor([2.0])),
    "linear_cross_entropy bias": (lambda t: fusedops.linear_cross_entropy(X, R, TARGET, t), torch.randn(4)),
    "linear_cross_entropy target": (lambda t: fusedops.linear_cross_entropy(X, R, t), TARGET),
    "attention mask": (lambda t: fusedops.attention(Q, Q, Q, t), torch.zeros(4, 4, dtype=torch.bool)),
    "attention v": (lambda t: fusedops.attention(Q, Q, t), Q),
}


@pytest.mark.parametrize("backend", ["cpu", "eager", "sdpa"])
@pytest.mark.parametrize(("call", "tensor"), FREED.values(), ids=FREED)
def test_a_freed_storage_is_refused(call: Callable[[Tensor], Any], tensor: Tensor, backend: str) -> None:
    with fusedops.use(f"{backend},auto", fallback="silent"):
        call(tensor)  # the launcher of a remembered call is not asked again
        with pytest.raises(InvalidInputError, match="freed"):
            call(freed(tensor))
        call(tensor)


@pytest.mark.parametrize("op", [fusedops.swiglu, fusedops.geglu])
@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_a_tensor_freed_before_backward_is_refused(op: Callable[..., Tensor], backend: str) -> None:
    gate, up = torch.randn(8, H, requires_grad=True), torch.randn(8, H)
    y = op(gate, up, backend=backend)
    up.untyped_storage().resize_(0)
    with pytest.raises(InvalidInputError, match="freed"):
        y.sum().backward()


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_a_tensor_without_elements_is_not_freed(backend: str) -> None:
    nothing = torch.empty(0, 8)
    assert fusedops.swiglu(nothing, freed(nothing), backend=backend).shape == (0, 8)


def count_references_as(monkeypatch: pytest.MonkeyPatch, count: Callable[[Any], int]) -> None:
    """Let the question of what holds saved tensors run on an interpreter that counts in another way."""
    monkeypatch.setattr(sys, "getrefcount", count)
    spec = importlib.util.find_spec("fusedops._dispatch.backward.held")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr("fusedops._dispatch.autograd.is_held", module.is_held)


@pytest.fixture(params=["as it is", "fewer"])
def counts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """References as they are counted, and without that of the parameter, as Python 3.14 does."""
    if request.param == "fewer":
        count = sys.getrefcount
        count_references_as(monkeypatch, lambda item: count(item) - 2)  # of them one is that of this function


def loss_of() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    return fusedops.linear_cross_entropy(x, weight, TARGET), x, weight


def kept(loss: Tensor) -> list[Tensor]:
    return [each for each in loss.grad_fn.saved_tensors if each is not None]  # type: ignore[union-attr]


HOLDERS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "tensors": kept,
    "detached": lambda loss: [each.detach() for each in kept(loss)],
    "storages": lambda loss: [torch.empty(0, dtype=each.dtype).set_(each) for each in kept(loss)],
    "numpy": lambda loss: [torch.from_numpy(each.detach().numpy()) for each in kept(loss)],
    "bases": lambda loss: [each if each._base is None else each._base for each in kept(loss)],
}


@pytest.mark.usefixtures("counts")
@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_backward_leaves_saved_tensors_that_are_held(hold: Callable[[Tensor], list[Tensor]]) -> None:
    loss, *_ = loss_of()
    held = hold(loss)
    before = [each.clone() for each in held]
    (loss * 3).backward()
    assert all(torch.equal(one, other) for one, other in zip(held, before))


@pytest.mark.usefixtures("counts")
def test_backward_leaves_what_a_hook_of_one_tensor_kept() -> None:
    loss, *_ = loss_of()
    held: list[tuple[Tensor, Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        held.append((tensor, tensor.clone()))
        return tensor

    for saved, tensor in zip(loss.grad_fn._raw_saved_tensors, loss.grad_fn.saved_tensors):  # type: ignore[union-attr]
        if tensor is not None:
            saved.register_hooks(pack, lambda tensor: tensor)
    (loss * 3).backward()
    assert held
    assert all(torch.equal(*each) for each in held)


def test_backward_leaves_saved_tensors_where_holders_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    count_references_as(monkeypatch, lambda item: 3)
    loss, x, _ = loss_of()
    addresses = {each.data_ptr() for each in kept(loss)}
    loss.backward()
    assert x.grad is not None
    assert x.grad.data_ptr() not in addresses


@pytest.mark.usefixtures("counts")
def test_saved_values_that_nothing_holds_become_the_gradients() -> None:
    loss, x, weight = loss_of()
    addresses = {each.data_ptr() for each in kept(loss)}
    loss.backward()
    assert x.grad is not None
    assert x.grad.data_ptr() in addresses
    assert weight.grad is not None
    assert weight.grad.data_ptr() in addresses
