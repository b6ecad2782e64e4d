"""The results of swiglu and geglu against float64, for dtypes, layouts of gate and up, clamps and special values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cpu_values import DTYPES, LAYOUTS, SHAPES, assert_close, rounded
from torch import Tensor

import fusedops

pytestmark = pytest.mark.usefixtures("on_cpu")

GPT_OSS = {"limit": 1.5, "alpha": 1.702, "offset": 1.0}
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "swiglu": fusedops.swiglu,
    "gpt_oss": lambda *args, **kwargs: fusedops.swiglu(*args, **GPT_OSS, **kwargs),
    "geglu_tanh": fusedops.geglu,
    "geglu_erf": lambda *args, **kwargs: fusedops.geglu(*args, approximate="none", **kwargs),
}


def gated64(name: str, gate: Tensor, up: Tensor) -> Tensor:
    if name.startswith("geglu"):
        return torch.nn.functional.gelu(gate, approximate="tanh" if name == "geglu_tanh" else "none") * up
    if name == "swiglu":
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def check(name: str, call: Callable[[Tensor], Tensor], wide: Callable[[Tensor], Tensor], packed: Tensor) -> None:
    leaf, wide_leaf = packed.detach().requires_grad_(), packed.detach().double().requires_grad_()
    y, wanted = call(leaf), wide(wide_leaf)
    assert y.dtype is packed.dtype
    assert_close(y.detach(), wanted.detach(), 3.0)
    grad = rounded(tuple(y.shape), y.dtype, 5)
    (ours,), (theirs,) = torch.autograd.grad(y, leaf, grad), torch.autograd.grad(wanted, wide_leaf, grad.double())
    assert_close(ours.contiguous(), theirs, 12.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_layouts(dtype: torch.dtype, layout: str, name: str) -> None:
    f = FUNCTIONS[name]
    for shape in [*SHAPES, (300, 700)]:
        packed = rounded((*shape[:-1], 2 * shape[-1]), dtype) * 2
        if packed.numel():
            packed = LAYOUTS[layout](packed)
        halves: Callable[[Tensor], Tensor] = lambda p: gated64(name, *p.chunk(2, -1))  # noqa: E731
        pairs: Callable[[Tensor], Tensor] = lambda p: gated64(name, p[..., ::2], p[..., 1::2])  # noqa: E731
        check(name, lambda p: f(p), halves, packed)
        check(name, lambda p: f(p, interleaved=True), pairs, packed)
        check(name, lambda p: f(*p.chunk(2, -1)), halves, packed)
        check(name, lambda p: f(*(t.contiguous() for t in p.chunk(2, -1))), halves, packed)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_odd_pairs_of_layouts(name: str) -> None:
    """Each tensor is read where it is, or copied: rows of another stride, cut, expanded, of no dimension."""
    f = FUNCTIONS[name]
    base = rounded((6, 4, 64), torch.float32)
    for gate, up in [
        (base[..., :30], rounded((6, 4, 30), torch.float32, 1)),
        (base[:, 1:3, :32], base[:, :2, 32:]),
        (base[::2, 0, :10], base[1::2, 3, 5:15]),
        (base[0, 0, ::2], base[0, 0, 1::2]),
        (base[:1, :1, :7], base[:1, :1, 7:14].expand(1, 1, 7)),
        (base[:, :1, :9].expand(6, 4, 9), base[..., 9:18]),
        (base[0, 0, 0], base[0, 0, 1]),
        (torch._neg_view(base[..., :32].clone()), torch._neg_view(base.clone())[..., 32:]),
    ]:
        assert_close(f(gate, up), gated64(name, gate.double(), up.double()), 3.0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_one_gradient_alone(interleaved: bool) -> None:
    gate, up = rounded((5, 33), torch.bfloat16), rounded((5, 33), torch.bfloat16, 1)
    grad = rounded((5, 33), torch.bfloat16, 2)
    both = torch.ops.fusedops.swiglu_backward(grad, gate, up, None, 1.0, 0.0, interleaved, [True, True])
    first = torch.ops.fusedops.swiglu_backward(grad, gate, up, None, 1.0, 0.0, interleaved, [True, False])
    second = torch.ops.fusedops.swiglu_backward(grad, gate, up, None, 1.0, 0.0, interleaved, [False, True])
    assert torch.equal(first[0], both[0])
    assert torch.equal(second[1], both[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [4096, 4100, 33])
def test_tensors_beyond_the_caches_have_the_same_bits(dtype: torch.dtype, columns: int) -> None:
    """Above 32 MiB results are stored past the caches."""
    rows = (2**23 if dtype is torch.float32 else 2**24) // columns + 1
    packed, grad = rounded((rows, 2 * columns), dtype), rounded((rows, columns), dtype, 1)
    some = slice(rows - 20, rows)

    def run(part: slice, **form: Any) -> list[Tensor]:
        leaf = packed[part].detach().requires_grad_()
        y = fusedops.swiglu(leaf, **form)
        return [y.detach(), *torch.autograd.grad(y, leaf, grad[part])]

    for form in ({}, {"interleaved": True}):
        for large, small in zip(run(slice(None), **form), run(some, **form), strict=True):
            assert torch.equal(large[some], small)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values(name: str) -> None:
    f, inf = FUNCTIONS[name], math.inf
    gate = torch.tensor([-inf, -1e30, -200.0, -90.0, -0.0, 0.0, 200.0, 1e30, inf, math.nan])
    y = f(gate, torch.ones_like(gate))
    factor = 2.0 if name == "gpt_oss" else 1.0
    largest = 1.5 / (1 + math.exp(-1.702 * 1.5)) if name == "gpt_oss" else None
    assert not y[:3].any()
    assert y[3].abs() < 1e-30
    assert not y[4:6].any()
    for at, value in ((6, 200.0), (7, 1e30), (8, inf)):
        assert y[at] == pytest.approx(factor * (value if largest is None else largest), rel=1e-6)
    assert y[9].isnan()
    assert f(torch.ones(1), torch.tensor([math.nan])).isnan()


def test_a_clamp_stops_the_gradient_beyond_its_bounds() -> None:
    gate = torch.tensor([1.0, 1.5, 1.6, math.nan, 1.0, 1.0, 1.0], requires_grad=True)
    up = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.5, -1.6, math.nan], requires_grad=True)
    y = fusedops.swiglu(gate, up, limit=1.5)
    dgate, dup = torch.autograd.grad(y, (gate, up), torch.ones(7))
    assert (dgate != 0).tolist() == [True, True, False, False, True, True, True]
    assert (dup != 0).tolist() == [True, True, True, True, True, False, False]
    free = torch.autograd.grad(fusedops.swiglu(gate, up), (gate, up), torch.ones(7))
    assert free[0][3].isnan()
    assert free[1][3].isnan()
    assert free[0][6].isnan()


@pytest.mark.parametrize("alpha", [0.0, -1.0, 3e38, -3e38])
def test_alphas(alpha: float) -> None:
    gate, up = torch.tensor([-2.0, -0.5, 0.0, 1e-3, 3.0, math.inf]), torch.ones(6)
    wide = gate[:5].double()
    assert_close(fusedops.swiglu(gate[:5], up[:5], alpha=alpha), wide * torch.sigmoid(alpha * wide))
    if alpha < 0:
        assert fusedops.swiglu(gate, up, alpha=alpha)[5] == 0
    leaf = gate[:5].requires_grad_()
    (gradient,) = torch.autograd.grad(fusedops.swiglu(leaf, up[:5], alpha=alpha).sum(), leaf)
    slope = torch.where(leaf * alpha > 0, 1.0, torch.where(leaf == 0, 0.5, 0.0))
    if abs(alpha) > 1:
        assert torch.equal(gradient, slope)


def test_a_sigmoid_that_is_zero_gives_zero_for_the_largest_numbers() -> None:
    gate = torch.tensor([-150.0, -1e4, -math.inf], requires_grad=True)
    y = fusedops.swiglu(gate, torch.zeros(3), offset=3e38)
    (gradient,) = torch.autograd.grad(y.sum(), gate)
    assert not y.any()
    assert not gradient.any()
