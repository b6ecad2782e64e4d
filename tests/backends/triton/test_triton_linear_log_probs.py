"""The kernels of linear_log_probs in Triton's interpreter: results beyond a block, bytes, edges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
from triton_cases import needs_loops
from triton_traffic import Traffic, total

from fusedops.ops.losses import formulas
from fusedops_triton.losses import _linear_log_probs as kernels
from fusedops_triton.losses._linear_cross_entropy import Chunk

# NaN and infinity are wanted in some tests: the GPU does not warn of them, NumPy does
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), needs_loops]
OPTIONS = kernels.Options(0.7, 5.0, -100, True)


def chunk_of(classes: int, dtype: torch.dtype, targets: list[int]) -> Chunk:
    padded = -(-classes // 16) * 16
    memory = torch.randn(len(targets), padded).to(dtype)
    return Chunk(slice(0, len(targets)), memory[:, :classes], padded, torch.tensor(targets), None)


def statistics(chunk: Chunk, options: kernels.Options = OPTIONS) -> list[Tensor]:
    results = [torch.empty(len(chunk.target)) for _ in range(3)]
    kernels.statistics(chunk, results[0], results[1] if options.return_entropy else None, results[2], options)
    return results


@pytest.mark.parametrize("classes", [2048, 2049, 4100])
def test_every_column(classes: int) -> None:
    chunk = chunk_of(classes, torch.float32, [0, classes - 1, 2047, -100])
    chunk.logits[1, ::3] = -torch.inf
    wide = chunk.logits.double().requires_grad_()
    z = formulas.capped(wide, 5.0) / 0.7
    want = formulas.log_probs(z, chunk.target, -100)
    results = statistics(chunk)
    torch.testing.assert_close([each.double() for each in results[:2]], [*want], rtol=2e-6, atol=2e-6)
    grads = [torch.randn(4) for _ in range(2)]
    (slope,) = torch.autograd.grad(want, wide, [each.double() for each in grads])
    kernels.gradients(chunk, grads[0], grads[1], results[1], results[2], OPTIONS)
    torch.testing.assert_close(chunk.logits.double(), slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("entropy", [True, False])
def test_logits_are_read_once_forward_and_read_and_written_once_backward(entropy: bool, traffic: Traffic) -> None:
    options = OPTIONS._replace(return_entropy=entropy)
    chunk = chunk_of(20000, torch.bfloat16, [5, 19999, -100])
    logits = 2 * 20000 * 2  # the ignored row is not read
    results = statistics(chunk, options)
    assert logits <= total(traffic) <= 1.05 * logits
    traffic.sizes.update(loads=0, stores=0)
    kernels.gradients(chunk, *[torch.ones(3)] * 2, results[1], results[2], options)
    assert 2 * logits <= total(traffic) <= 1.05 * (2 * logits + logits // 2)
    assert (chunk.logits[2] == 0).all()


@pytest.mark.parametrize("wrong", [-1, 300, 2**40])
def test_a_target_out_of_range_is_nan(wrong: int) -> None:
    chunk = chunk_of(300, torch.float32, [wrong, 3])
    results = statistics(chunk)
    assert [each.isnan().tolist() for each in results[:2]] == [[True, False]] * 2
    kernels.gradients(chunk, *[torch.ones(2)] * 2, results[1], results[2], OPTIONS)
    assert chunk.logits[0].isnan().all()
    assert chunk.logits[1].isfinite().all()
