"""The way of a call: the same numbers by every way through torch, gradients of every kind, and who runs when."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy
import pytest
import torch
from ascend import ascend
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from fusedops import FusedOpsError, InvalidInputError, NoBackendError
from fusedops._op import OPS
from fusedops.constraints import Dim

OP = OPS["scaled_masked_softmax"]
softmax = fusedops.scaled_masked_softmax
torch_op = torch.ops.fusedops.scaled_masked_softmax


def numbers(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


X = numbers(2, 3, 5, 7)
MASK = numbers(2, 1, 5, 7, seed=1) > 0.5
MASK[0, :, 2] = True
SCALE = 0.3
G = numbers(2, 3, 5, 7, seed=2)
# kernel arguments: (mask, scale, causal)
CALLS: list[tuple[Any, float, bool]] = [(None, 1.0, False), (MASK, SCALE, False), (MASK, SCALE, True)]
calls = pytest.mark.parametrize(("mask", "scale", "causal"), CALLS, ids=["plain", "masked", "causal"])


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-13, rtol=1e-11)


def want(mask: Any, scale: float, causal: bool, x: Tensor = X) -> tuple[Tensor, Tensor]:
    """The reference's output, and its gradient for G."""
    x = x.detach().clone().requires_grad_()
    y = OP.reference(x, mask, scale, causal=causal)
    return y.detach(), torch.autograd.grad(y, x, G)[0]


@contextmanager
def counting_compilations() -> Iterator[list[Any]]:
    """A list that grows by one for each graph that torch.compile makes."""
    torch._dynamo.reset()
    graphs: list[Any] = []
    yield graphs
    torch._dynamo.reset()


def backend_that_counts(graphs: list[Any]) -> Callable[..., Any]:
    def forward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph)

    return aot_autograd(fw_compiler=forward, bw_compiler=lambda graph, inputs: make_boxed_func(graph))


# ------------------------------------------------------------------------------------------- the same numbers every way


class Seen(TorchDispatchMode):
    """Writes down the ops that pass."""

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
            close(compiled(again, None), OP.reference(again, None, scale, causal=causal))
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
        with pytest.raises(InvalidInputError, match="does not broadcast"):
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
        return OP.reference(x, mask, scale, causal=causal)

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
    close(tangent, torch.func.jvp(lambda x: OP.reference(x, MASK, SCALE), (X,), (G,))[1])


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


# ------------------------------------------------------------------------------------------------------------ gradients


@calls
@pytest.mark.parametrize("way", [softmax, torch_op, OP.reference], ids=["fusedops", "torch.ops", "reference"])
def test_gradcheck_and_gradgradcheck(way: Any, mask: Any, scale: float, causal: bool) -> None:
    x = X[:1, :2, 1:4, :4].clone().requires_grad_()
    mask = None if mask is None else mask[:1, :, 1:4, :4]
    function = OP.positional(way) if way is not torch_op else way

    def f(x: Tensor) -> Tensor:
        return function(x, mask, scale, causal)

    assert gradcheck(f, (x,))
    assert gradgradcheck(f, (x,))


@calls
def test_the_reference_backward_is_the_derivative_of_the_reference(mask: Any, scale: float, causal: bool) -> None:
    y, dx = want(mask, scale, causal)
    close(OP.backward(*OP.backward_args(G, y, (X, mask, scale, causal), (True,))), dx)


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
    backward = OP.backward_args(grad.requires_grad_(args[0].requires_grad), y, args, (True,))
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
    torch.testing.assert_close(y.detach().cpu(), OP.reference(x.detach().cpu(), None, SCALE), atol=2e-6, rtol=1e-5)


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


# -------------------------------------------------------------------------------------------------------- who runs when


@pytest.mark.parametrize("way", [softmax, torch_op], ids=["fusedops", "torch.ops"])
def test_a_kernels_own_error_reaches_the_user_and_nothing_else_is_tried(way: Any, fakes: Any) -> None:
    class Broken(Exception):
        pass

    def break_down(*args: Any, **kwargs: Any) -> Any:
        raise Broken("half way")

    fakes("second")
    fakes("first", run=break_down, priority=90)
    for x in (X, X.clone().requires_grad_()):
        with pytest.raises(Broken, match=r"^half way$") as error:
            way(x)
        assert not isinstance(error.value, FusedOpsError)
        assert fakes.ran == ["first"]
        fakes.ran.clear()


def test_a_policy_changed_between_calls_of_a_compiled_function_is_seen(fakes: Any) -> None:
    fakes("a", priority=-5)
    fakes("b", priority=-6)
    with counting_compilations() as graphs:
        compiled = torch.compile(lambda x: softmax(x) + 1, fullgraph=True, backend=backend_that_counts(graphs))
        compiled(X)
        for name in ("a", "b", "a"):
            with fusedops.use(name):
                compiled(X)
        fusedops.set_policy("b")
        compiled(X)
        fusedops.set_policy(None)
        compiled(X)
        assert len(graphs) == 1
    assert fakes.ran == ["a", "b", "a", "b"]


def test_the_argument_of_a_compiled_call_is_obeyed(fakes: Any) -> None:
    fakes("a", priority=-5)
    with counting_compilations() as graphs:
        compiled = torch.compile(lambda x: softmax(x, backend="a"), fullgraph=True, backend=backend_that_counts(graphs))
        compiled(X.clone().requires_grad_()).sum().backward()
        assert len(graphs) == 1
    assert fakes.ran == ["a", "a backward"]


def test_backward_is_served_by_the_choice_of_forward_though_the_block_has_ended(fakes: Any) -> None:
    fakes("a", priority=-5)
    with fusedops.use("a"):
        y = softmax(X.clone().requires_grad_())
    with fusedops.use("eager"):
        y.sum().backward()
    assert fakes.ran == ["a", "a backward"]


def test_through_torch_ops_the_argument_lasts_until_backward(fakes: Any) -> None:
    # a policy of use() is looked up when backward runs: the registered op has no place to keep it
    fakes("a", priority=-5)
    y = torch_op(X.clone().requires_grad_(), backend="a")
    y.sum().backward()
    assert fakes.ran == ["a", "a backward"]


def test_backward_may_be_served_by_another_backend(fakes: Any) -> None:
    fakes("a", backward=None)
    fakes("b", Dim("x", (-1,), at_most=1), priority=40)
    x = X.clone().requires_grad_()
    softmax(x, MASK, SCALE).backward(G)
    assert fakes.ran == ["a", "b backward"]
    assert x.grad is not None
    close(x.grad, want(MASK, SCALE, False)[1])


def test_the_second_derivative_takes_the_reference(fakes: Any) -> None:
    fakes("a")
    x = X.clone().requires_grad_()
    (dx,) = torch.autograd.grad(softmax(x, MASK, SCALE), x, G, create_graph=True)
    assert fakes.ran == ["a"], "a kernel's gradient has no graph"
    (second,) = torch.autograd.grad(dx.square().sum(), x)
    again = X.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(OP.reference(again, MASK, SCALE), again, G, create_graph=True)
    close(second, torch.autograd.grad(wanted.square().sum(), again)[0])


def test_no_kernel_sees_a_call_that_is_invalid(fakes: Any) -> None:
    fakes("a")
    for way in (softmax, torch_op):
        with pytest.raises(InvalidInputError):
            way(X, MASK[..., :3])
    assert fakes.ran == []


def test_refused_by_all_is_an_error_by_every_way(fakes: Any) -> None:
    fakes("a", Dim("x", (-1,), at_most=1))
    with fusedops.use("a", fallback="raise"):
        for way in (softmax, torch_op):
            for x in (X, X.clone().requires_grad_()):
                with pytest.raises(NoBackendError, match="dim -1 of x is 7; needs a size of at most 1"):
                    way(x)


# -------------------------------------------------------------------------------------------------------- invalid input

INVALID: list[tuple[str, Callable[[], Any], str]] = [
    ("x list", lambda: softmax([[1.0]]), "x is a list; needs a torch.Tensor; convert it with torch.as_tensor"),  # type: ignore[arg-type]
    ("x None", lambda: softmax(None), "x is a NoneType; needs a torch.Tensor; convert it with torch.as_tensor"),  # type: ignore[arg-type]
    ("x array", lambda: softmax(numpy.ones((2, 2))),  # type: ignore[arg-type]
     "x is a ndarray; needs a torch.Tensor; convert it with torch.as_tensor"),
    ("x int", lambda: softmax(torch.ones(2, 2, dtype=torch.int32)),
     "x is torch.int32; needs float16, bfloat16, float32 or float64; convert it, as in x.float()"),
    ("x bool", lambda: softmax(torch.ones(2, 2, dtype=torch.bool)),
     "x is torch.bool; needs float16, bfloat16, float32 or float64; convert it, as in x.float()"),
    ("x complex", lambda: softmax(torch.ones(2, 2, dtype=torch.complex64)),
     "x is torch.complex64; needs float16, bfloat16, float32 or float64; convert it, as in x.float()"),
    ("x float8", lambda: softmax(torch.ones(2, 2).to(torch.float8_e5m2)),
     "x is torch.float8_e5m2; needs float16, bfloat16, float32 or float64; convert it, as in x.float()"),
    ("x rank 1", lambda: softmax(torch.ones(2)),
     "x has 1 dimensions; needs (..., Sq, Sk); add one, as in x.unsqueeze(0)"),
    ("x rank 0", lambda: softmax(torch.ones(())),
     "x has 0 dimensions; needs (..., Sq, Sk); add one, as in x.unsqueeze(0)"),
    ("mask list", lambda: softmax(X, [True]),  # type: ignore[arg-type]
     "mask is a list; needs a bool tensor or None; convert it with torch.as_tensor"),
    ("mask bool", lambda: softmax(X, True),  # type: ignore[arg-type]
     "mask is a bool; needs a bool tensor or None; convert it with torch.as_tensor"),
    ("mask float", lambda: softmax(X, torch.zeros(5, 7)),
     "mask is torch.float32; needs bool or uint8, True where masked out; of an additive mask take mask < 0"),
    ("mask int", lambda: softmax(X, torch.zeros(5, 7, dtype=torch.int64)),
     "mask is torch.int64; needs bool or uint8, True where masked out; convert it with mask != 0"),
    ("mask shape", lambda: softmax(X, torch.zeros(2, 7, dtype=torch.bool)),
     "mask has shape (2, 7), which does not broadcast to x (2, 3, 5, 7); needs each size, from the last, to be 1 or "
     "x's; give it sizes of 1 where it repeats; for padding of shape (b, sk) pass mask[:, None, None, :]"),
    ("mask rank", lambda: softmax(X, torch.zeros(1, 2, 3, 5, 7, dtype=torch.bool)),
     "mask has shape (1, 2, 3, 5, 7), which does not broadcast to x (2, 3, 5, 7); needs each size, from the last, to "
     "be 1 or x's; give it sizes of 1 where it repeats; for padding of shape (b, sk) pass mask[:, None, None, :]"),
    ("scale tensor", lambda: softmax(X, None, torch.tensor(0.5)),  # type: ignore[arg-type]
     "scale is a tensor of 1 elements; needs a Python number; use float(scale), or scale.item() of a tensor"),
    ("scale text", lambda: softmax(X, None, "0.5"),  # type: ignore[arg-type]
     "scale is a str; needs a Python number; use float(scale), or scale.item() of a tensor"),
    ("scale None", lambda: softmax(X, None, None),  # type: ignore[arg-type]
     "scale is a NoneType; needs a Python number; use float(scale), or scale.item() of a tensor"),
    ("scale complex", lambda: softmax(X, None, 1j),  # type: ignore[arg-type]
     "scale is a complex; needs a Python number; use float(scale), or scale.item() of a tensor"),
    ("scale inf", lambda: softmax(X, None, float("inf")),
     "scale is inf; needs a finite number; 1 / sqrt(head size) is usual"),
    ("scale nan", lambda: softmax(X, None, float("nan")),
     "scale is nan; needs a finite number; 1 / sqrt(head size) is usual"),
    ("causal 1", lambda: softmax(X, causal=1), "causal is 1; needs True or False; pass bool(causal)"),  # type: ignore[arg-type]
    ("causal None", lambda: softmax(X, causal=None), "causal is None; needs True or False; pass bool(causal)"),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["", "inside a transform"])
@pytest.mark.parametrize(("wrong", "message"), [case[1:] for case in INVALID], ids=[case[0] for case in INVALID])
def test_invalid_input_says_given_needed_and_what_to_do(wrong: Callable[[], Any], message: str, grad: bool) -> None:
    with forward_ad.dual_level() if grad else nullcontext(), pytest.raises(InvalidInputError) as error:
        wrong()
    assert str(error.value) == f"scaled_masked_softmax: {message}"
    assert isinstance(error.value, ValueError)


def test_a_mask_on_another_device_is_invalid() -> None:
    with ascend():
        mask = torch.zeros(5, 7, dtype=torch.bool, device="npu")
        with pytest.raises(InvalidInputError) as error:
            softmax(X, mask)
        assert str(error.value) == (
            "scaled_masked_softmax: mask is on npu:0 and x on cpu; needs one device; move it with mask.to(x.device)"
        )
        with pytest.raises(InvalidInputError, match="mask is on cpu and x on npu:0"):
            softmax(X.to("npu"), MASK)
    # torch gives meta and cpu the same index
    for x, mask in ((X, MASK.to("meta")), (X.to("meta"), MASK)):
        for way in (softmax, torch_op):
            with pytest.raises(InvalidInputError, match=f"mask is on {mask.device} and x on {x.device}"):
                way(x, mask)
    assert softmax(X.to("meta"), MASK.to("meta")).is_meta


def test_a_huge_integer_scale_is_invalid_too() -> None:
    with pytest.raises(InvalidInputError, match="scale is"):
        softmax(X, None, 10**400)


@pytest.mark.parametrize("wrong", [{"dim": -1}, {"attn_mask": None}, {"fallback": "raise"}])
def test_an_unknown_keyword_is_a_type_error(wrong: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        softmax(X, **wrong)
    with pytest.raises(TypeError):
        softmax(X, None, 1.0, True)  # type: ignore[misc]  # causal is keyword-only


def test_numbers_of_numpy_and_bool_are_numbers() -> None:
    close(softmax(X, None, numpy.float64(0.5)), softmax(X, None, 0.5))
    close(softmax(X, None, 2), softmax(X, None, 2.0))


def test_nothing_is_warned_of_on_the_way() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = X.clone().requires_grad_()
        softmax(x, MASK, SCALE).backward(G)
