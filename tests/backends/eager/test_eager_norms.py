"""The eager kernels of the norms: slabs, sizes of models, peers, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eager_bias_cases import DTYPES
from eager_memory import peak
from norm_tolerance import gradient_tolerance, tolerance
from torch import Tensor

import fusedops
from fusedops import testing
from fusedops.testing import OPS
from fusedops_eager import _norms

NORMS = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


def call_of(name: str, x: Tensor, residual: Tensor | None = None, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return a call with weight and bias (H,) of ``dtype``."""
    call: dict[str, Any] = {"x": x}
    if "residual" in OPS[name].parameters:
        call["residual"] = torch.randn(x.shape).to(x.dtype) if residual is None else residual
    for key in ("weight", "bias"):
        if key in OPS[name].parameters:
            call[key] = torch.randn(x.shape[-1]).to(dtype or x.dtype)
    return call


SHAPES = [(700, 1111), (2, 1, 300_001), (90_000, 7), (3, 5, 70_001)]
# each norm has two of the shapes and both dtypes: test_eager_kit.py has all pairs, with short slabs
TRUE_SIZES = [(name, SHAPES[(at + turn) % 4], (F32, BF16)[turn]) for at, name in enumerate(NORMS) for turn in range(2)]


@pytest.mark.parametrize(("name", "shape", "dtype"), TRUE_SIZES, ids=str)
def test_true_sizes(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Slabs as they are in use. Random gradients: sums of many rows stay small."""
    op, call = OPS[name], call_of(name, torch.randn(shape).to(dtype))
    args = op.bind((), call)
    want = testing.expected(op, args)
    leaves = {key: call[key].requires_grad_() for key in op.differentiable}
    ys = op.as_tuple(op.function(**call, backend="eager"))
    for y, wide in zip(ys, want.outputs):
        testing.assert_within(y, wide, tolerance(op, dtype), name)
    got = torch.autograd.grad(ys, [*leaves.values()], [grad.to(dtype) for grad in want.grads])
    for (key, leaf), gradient in zip(leaves.items(), got):
        allowed = gradient_tolerance(op, dtype)
        rows = call["x"].numel() // leaf.numel()  # torch's layer norm adds them one by one
        allowed = allowed._replace(absolute=allowed.absolute * max(1.0, rows / 2048))
        testing.assert_within(gradient, want.gradients[key], allowed, key)


@pytest.mark.usefixtures("slabs")
def test_numbers_at_the_edges_of_rms_norm() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[0.0] * 4, [1, -2, inf, 4], [1, nan, 2, 3], [1e20, 1, 2, 3], [1e-30, 0, 0, 0]])
    for eps in (0.0, 1e-6):
        want = OPS["rms_norm"].reference(x, None, eps, 0.0)
        torch.testing.assert_close(fusedops.rms_norm(x, eps=eps, backend="eager"), want, equal_nan=True)
        torch.testing.assert_close(torch.nn.functional.rms_norm(x, (4,), eps=eps), want, equal_nan=True)


@pytest.mark.usefixtures("slabs")
@pytest.mark.parametrize("name", NORMS)
def test_the_weight_gradient_is_summed_in_float32(name: str) -> None:
    """4096 rows of 1 are 4096, and not the 256 at which a bfloat16 sum stops."""
    x = torch.tensor([1.0, -1.0]).repeat(4096, 1).to(BF16)
    call = call_of(name, x, torch.zeros_like(x))
    leaf = call["weight"] = torch.ones(2, dtype=BF16, requires_grad=True)
    y = OPS[name].as_tuple(OPS[name].function(**call, eps=0.0, backend="eager"))[0]
    y.backward(x)
    assert torch.equal(leaf.grad, torch.full((2,), 4096.0, dtype=BF16))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_the_bits_do_not_depend_on_the_threads(name: str, dtype: torch.dtype) -> None:
    op, call = OPS[name], call_of(name, torch.randn(3000, 513).to(dtype))
    bits: list[tuple[Tensor, ...]] = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        leaves = {key: call[key].detach().requires_grad_() for key in op.differentiable}
        ys = op.as_tuple(op.function(**{**call, **leaves}, backend="eager"))
        bits.append((*ys, *torch.autograd.grad([y.sum() for y in ys], [*leaves.values()])))
    torch.set_num_threads(1)
    for other in bits[1:]:
        assert all(map(torch.equal, bits[0], other))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_peak_memory(dtype: torch.dtype) -> None:
    """Memory beside the results depends on the slab, not on the tensor."""
    shape = (16384, 1024) if dtype is BF16 else (8192, 1024)
    x, weight = torch.randn(shape).to(dtype), torch.randn(1024).to(dtype)
    size = x.numel() * x.element_size()
    y, _, rstd = _norms.rms_forward(x, None, weight, 1e-6, 0.0)
    assert peak(lambda: OPS["rms_norm"].evidence.unfused(x, weight, 1e-6, 0.0), size) > 1.9
    assert peak(lambda: _norms.rms_forward(x, None, weight, 1e-6, 0.0), size) < 1.15
    assert peak(lambda: _norms.rms_forward(x, x, weight, 1e-6, 0.0), size) < 2.15
    one, two = (dtype,), (dtype, dtype)
    assert peak(lambda: _norms.rms_backward(y, None, x, rstd, weight, 0.0, one, True), size) < 1.35
    assert peak(lambda: _norms.rms_backward(y, y, x, rstd, weight, 0.0, two, True), size) < 2.35
    assert peak(lambda: _norms.layer_forward(x, None, weight, weight, 1e-5), size) < 1.15
    _, _, mean, rstd = _norms.layer_forward(x, None, weight, weight, 1e-5)
    both = (True, True)
    assert peak(lambda: _norms.layer_backward(y, None, x, mean, rstd, weight, weight, one, both), size) < 1.15
    assert peak(lambda: _norms.layer_backward(y, y, x, mean, rstd, weight, weight, two, both), size) < 2.4


@pytest.mark.parametrize("name", NORMS)
def test_other_devices_do_not_synchronise(name: str) -> None:
    """On the meta device any read of the data raises."""
    for dtype in DTYPES:
        x = torch.empty(90, 80, dtype=dtype, device="meta").T.requires_grad_()
        call = {
            key: None if value is None else value.to("meta") for key, value in call_of(name, torch.ones(80, 90)).items()
        }
        call["x"] = x
        ys = OPS[name].as_tuple(OPS[name].function(**call, backend="eager"))
        assert all(y.shape == x.shape and y.is_contiguous() for y in ys)
        (dx,) = torch.autograd.grad(ys, [x], [torch.empty_like(y) for y in ys])
        assert dx.dtype is dtype
