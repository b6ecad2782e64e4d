"""The eager kernels of the norms: numbers at the edges, sums."""

from __future__ import annotations

import pytest
import torch

import fusedops
from fusedops.testing import OPS

NORMS = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")
BF16 = torch.bfloat16


def test_numbers_at_the_edges_of_rms_norm() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[0.0] * 4, [1, -2, inf, 4], [1, nan, 2, 3], [1e20, 1, 2, 3], [1e-30, 0, 0, 0]])
    for eps in (0.0, 1e-6):
        want = OPS["rms_norm"].reference(x, None, eps, 0.0)
        torch.testing.assert_close(fusedops.rms_norm(x, eps=eps, backend="eager"), want, equal_nan=True)
        torch.testing.assert_close(torch.nn.functional.rms_norm(x, (4,), eps=eps), want, equal_nan=True)


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
