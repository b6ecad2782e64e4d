"""The eager kernels of the norms: slabs, sizes of models, peers, memory."""

from __future__ import annotations

import pytest
import torch
from eager_memory import peak

import fusedops
from fusedops.testing import OPS
from fusedops_eager.norms import _norms

NORMS = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


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
    leaf = torch.ones(2, dtype=BF16, requires_grad=True)
    others = {"residual": torch.zeros_like(x), "bias": torch.zeros(2, dtype=BF16)}
    call = {key: value for key, value in others.items() if key in OPS[name].parameters}
    y = OPS[name].as_tuple(OPS[name].function(x, weight=leaf, **call, eps=0.0, backend="eager"))[0]
    y.backward(x)
    assert torch.equal(leaf.grad, torch.full((2,), 4096.0, dtype=BF16))


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
