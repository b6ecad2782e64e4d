"""Viewless tensors: what they share, what they do not, and where there is no storage to share."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import megatron_peer
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedops
from fusedops import (
    MakeViewlessTensor,
    assert_viewless_tensor,
    make_viewless_tensor,
    safely_set_viewless_tensor_data,
    viewless,
)

MAKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "function": lambda view: make_viewless_tensor(view, requires_grad=True, keep_graph=True),
    "Function": lambda view: MakeViewlessTensor.apply(view, True),
}
pytestmark = [  # what torch.compile does itself, and torch warns of
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[Tensor], Tensor]:
    return MAKERS[request.param]


def compiled(function: Callable[..., Any], *args: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)(*args)


# ---------------------------------------------------------------------------------------------------- what they share


def test_shares_storage_and_not_the_version_counter(x: Tensor, make: Callable[[Tensor], Tensor]) -> None:
    view = (x * 2).t()[1:]
    y = make(view)
    assert y._base is None
    assert y.data_ptr() == view.data_ptr()
    assert (y.shape, y.stride(), y.storage_offset()) == (view.shape, view.stride(), view.storage_offset())
    before = y._version
    with torch.no_grad():
        view.add_(1)
    assert torch.equal(y, view)
    assert y._version == before


def test_the_viewed_tensor_is_freed(x: Tensor) -> None:
    base = (x * 2).detach()
    gone = weakref.ref(base)
    y = make_viewless_tensor(base.view(-1), False, True)
    del base
    assert gone() is None
    assert y.shape == (24,)


def test_gradient_goes_through(x: Tensor, make: Callable[[Tensor], Tensor]) -> None:
    y = make((x * 2).view(-1))
    assert y.requires_grad
    assert not y.is_leaf
    (gradient,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    assert torch.equal(gradient, 8 * x)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    assert torch.equal(second, torch.full_like(x, 8))


def test_a_write_to_the_view_is_not_an_error_in_backward(x: Tensor, make: Callable[[Tensor], Tensor]) -> None:
    """Sharing has a price: autograd does not see the write. detach() would report it, and Megatron's does not."""
    view = (x * 2).view(-1)
    y = make(view)
    loss = (y * y).sum()
    with torch.no_grad():
        view.zero_()
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.zeros_like(x))


def test_other_dtypes_and_devices() -> None:
    for view in (torch.arange(6).view(2, 3), torch.zeros(4, dtype=torch.bool)[1:], torch.empty(4, device="meta")[1:]):
        y = make_viewless_tensor(view, False, True)
        assert (y._base, y.dtype, y.device, y.shape) == (None, view.dtype, view.device, view.shape)
    with pytest.raises(RuntimeError, match="floating point"):
        make_viewless_tensor(torch.arange(6).view(2, 3), True, False)


def test_inference_mode_and_fake_tensors() -> None:
    with torch.inference_mode():
        y = make_viewless_tensor(torch.zeros(4).view(2, 2), False, True)
    assert y.shape == (2, 2)
    with FakeTensorMode():
        y = make_viewless_tensor((torch.zeros(4, 6, requires_grad=True) * 2).view(-1), True, True)
        assert (y._base, y.requires_grad, y.shape) == (None, True, (24,))


# --------------------------------------------------------------------------------------------- traced and transformed


def test_under_compile_a_view_made_inside(x: Tensor, make: Callable[[Tensor], Tensor]) -> None:
    y = compiled(lambda x: make((x * 2).view(-1)), x)
    assert y._base is None
    assert torch.equal(torch.autograd.grad((y * y).sum(), x)[0], 8 * x)


def test_under_compile_a_view_given(x: Tensor, make: Callable[[Tensor], Tensor]) -> None:
    view = (x * 2).view(-1)
    assert compiled(MakeViewlessTensor.apply, view, True)._base is None
    y = compiled(make, view)
    assert y._base is None
    assert y.data_ptr() != view.data_ptr()  # a graph is functional: here it is a copy
    assert torch.equal(torch.autograd.grad((y * y).sum(), x)[0], 8 * x)


def test_under_compile_without_the_graph(x: Tensor) -> None:
    y = compiled(lambda x: make_viewless_tensor((x * 2).view(-1), False, False), x)
    assert (y._base, y.requires_grad) == (None, False)
    assert torch.equal(y, (x * 2).view(-1))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="requires_grad_"):
        compiled(lambda x: make_viewless_tensor((x * 2).view(-1), True, False), x)


def test_under_compile_what_is_no_view_is_not_copied() -> None:
    given = torch.ones(3)
    assert compiled(lambda x: make_viewless_tensor(x, False, True), given) is given


def test_under_compile_the_others() -> None:
    def step(tensor: Tensor, new: Tensor) -> Tensor:
        safely_set_viewless_tensor_data(assert_viewless_tensor(tensor), new)
        return tensor + 1

    tensor = torch.zeros(3)
    assert torch.equal(compiled(step, tensor, torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(tensor, torch.ones(3))


@pytest.mark.parametrize("strict", [True, False])
def test_export(make: Callable[[Tensor], Tensor], strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return make((x * 2).view(-1)) + 1

    x = torch.randn(3, 4)
    graph = torch.export.export(Model(), (torch.zeros(3, 4),), strict=strict)
    assert torch.equal(graph.module()(x), (x * 2).view(-1) + 1)


def test_torch_func(make: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 6)

    def loss(x: Tensor) -> Tensor:
        y = make((x * 2).view(-1))
        assert y._base is None
        return (y**3).sum()

    assert torch.allclose(torch.func.grad(loss)(x), 24 * x**2)
    assert torch.allclose(torch.func.vmap(torch.func.grad(loss))(x), 24 * x**2)
    assert torch.allclose(torch.func.jvp(loss, (x,), (torch.ones_like(x),))[1], (24 * x**2).sum())
    assert torch.allclose(torch.func.hessian(loss)(x).reshape(24, 24), torch.diag(48 * x.flatten()), atol=1e-5)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert torch.allclose(torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent, (24 * x**2).sum())


def test_torch_func_without_the_graph() -> None:
    x = torch.randn(4, 6)
    gradient = torch.func.grad(lambda x: (x + make_viewless_tensor(x.view(-1), False, False).view(4, 6)).sum())(x)
    assert torch.equal(gradient, torch.ones(4, 6))
    with pytest.raises(RuntimeError, match="requires_grad_"):
        torch.func.grad(lambda x: make_viewless_tensor(x.view(-1), True, False).sum())(x)


# ------------------------------------------------------------------------------------------------- the two that check


def test_assert_returns_what_it_was_given(x: Tensor) -> None:
    items = [x, None, "text", 3]
    for given in (x, items, None, "text", (x.view(-1),)):  # a tuple is no list: unchecked, as in the original
        assert assert_viewless_tensor(given) is given


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v], lambda v: [None, [v]]], ids=["tensor", "list", "nested"])
def test_assert_refuses_a_view(x: Tensor, wrap: Callable[[Tensor], Any]) -> None:
    with pytest.raises(
        AssertionError, match=r"view of shape \(24,\) of a tensor of shape \(4, 6\).*viewless.*from here"
    ):
        assert_viewless_tensor(wrap(x.view(-1)), extra_msg="from here")


def test_safely_set_data() -> None:
    tensor, new = torch.zeros(3), torch.ones(5)
    safely_set_viewless_tensor_data(tensor, new)
    assert tensor.data_ptr() == new.data_ptr()
    view = torch.zeros(4).view(2, 2)
    with pytest.raises(AssertionError, match=r"The new data has shape \(5,\)"):
        safely_set_viewless_tensor_data(view, new)
    assert view.shape == (2, 2)


def test_checks_stay_under_python_O() -> None:
    names: dict[str, Any] = {}
    exec(compile(inspect.getsource(viewless), viewless.__name__, "exec", optimize=1), names)  # as python -O compiles it
    with pytest.raises(AssertionError, match="viewless"):
        names["assert_viewless_tensor"](torch.zeros(4).view(2, 2))


# --------------------------------------------------------------------------------------------------- beside Megatron's


def outcome(library: Any, view: Tensor, requires_grad: bool, keep_graph: bool) -> dict[str, Any]:
    y = library.make_viewless_tensor(view, requires_grad, keep_graph)
    return {
        "same object": y is view,
        "base": y._base is None,
        "storage": y.data_ptr() == view.data_ptr(),
        "layout": (y.shape, y.stride(), y.dtype),
        "requires_grad": y.requires_grad,
        "leaf": y.is_leaf,
        "version": y is view or y._version == 0,
    }


@pytest.mark.parametrize("keep_graph", [True, False])
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_as_megatron(dtype: torch.dtype, requires_grad: bool, keep_graph: bool) -> None:
    peer = megatron_peer.modules().utils
    for leaf in (torch.zeros(4, 6, dtype=dtype), torch.zeros(4, 6, dtype=dtype, requires_grad=True)):
        hidden = leaf * 2
        for view in (hidden, hidden.view(-1), hidden.t(), hidden[1:, 2], hidden.detach().view(-1)):
            ours = outcome(fusedops, view, requires_grad, keep_graph)
            assert ours == outcome(peer, view, requires_grad, keep_graph)


def test_unlike_megatron_it_can_be_traced_and_transformed(x: Tensor) -> None:
    peer = megatron_peer.modules().utils
    view = x.detach()

    def loss(library: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: library.make_viewless_tensor((x * 2).view(-1), True, True).sum()

    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(loss(peer))(view)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(loss(peer), x)
    assert torch.equal(torch.func.grad(loss(fusedops))(view), torch.full((4, 6), 2.0))
    assert compiled(loss(fusedops), x).requires_grad
