"""The kernel of linear_cross_entropy in Triton's interpreter: results, bytes, edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from eager_memory import peak
from triton_cases import needs_loops
from triton_traffic import Traffic, total

import fusedops
from fusedops.ops.losses.arguments import LinearCrossEntropyArgs
from fusedops.ops.losses.formulas import LossOptions, capped, row_losses
from fusedops.testing import OPS
from fusedops_triton.losses import _linear_cross_entropy as kernels
from fusedops_triton.losses._scaled import scaled

# NaN and infinity are wanted in some tests: the GPU does not warn of them, NumPy does
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
OP = OPS["linear_cross_entropy"]
pytestmark = [pytestmark, needs_loops]


def rows(classes: int, dtype: torch.dtype, targets: list[int], **given: Any) -> tuple[torch.Tensor, ...]:
    """Run the kernel on random logits with padded rows; return the logits before and after, and the losses."""
    padded = -(-classes // 16) * 16
    memory = torch.randn(len(targets), padded).to(dtype)
    logits, losses = memory[:, :classes], torch.empty(len(targets), dtype=torch.promote_types(dtype, torch.float32))
    before = logits.clone()
    options = LossOptions(-100, *[given.get(name, default) for name, default in _DEFAULTS.items()], "mean", None)
    kernels.loss_rows(logits, padded, losses, torch.tensor(targets), None, None, options, given.get("gradient", True))
    return before, logits, losses


_DEFAULTS = {"label_smoothing": 0.0, "z_loss": 0.0, "softcap": None}


@pytest.mark.parametrize(("dtype", "classes"), [(torch.bfloat16, 20000), (torch.float32, 9001)])
def test_logits_are_read_twice_and_written_once(dtype: torch.dtype, classes: int, traffic: Traffic) -> None:
    before, _, _ = rows(classes, dtype, [5, classes - 1])
    fewest = 3 * before.numel() * before.element_size()
    assert fewest <= total(traffic) <= 1.05 * fewest


def test_an_ignored_row_is_written_only_and_a_loss_alone_reads_once(traffic: Traffic) -> None:
    before, after, losses = rows(9000, torch.float32, [-100])
    assert (after == 0).all()
    assert losses.tolist() == [0.0]
    assert total(traffic) <= 1.05 * before.numel() * 4
    traffic.sizes.update(loads=0, stores=0)
    before, after, _ = rows(9000, torch.float32, [7], gradient=False)
    assert torch.equal(before, after)
    assert total(traffic) <= 1.05 * before.numel() * 4


@pytest.mark.parametrize("wrong", [-1, 300, 2**40])
def test_a_target_out_of_range_is_nan(wrong: int) -> None:
    _, gradient, losses = rows(300, torch.float32, [wrong, 3])
    assert losses[0].isnan()
    assert gradient[0].isnan().all()
    assert losses[1].isfinite()
    assert gradient[1].isfinite().all()


def test_a_small_logit_keeps_its_digits_under_a_large_softcap() -> None:
    before, _, losses = rows(100, torch.float32, [3], softcap=1e6, gradient=False)
    want = torch.nn.functional.cross_entropy(before.double(), torch.tensor([3]))
    torch.testing.assert_close(losses[0].double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("classes", [2048, 2049, 4100])
@pytest.mark.parametrize("given", [{}, {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 5.0}], ids=["plain", "all"])
def test_every_column_of_the_gradient(classes: int, given: dict[str, Any]) -> None:
    targets = [0, classes - 1, 2047, -100]
    before, gradient, losses = rows(classes, torch.float32, targets, **given)
    wide, options = before.double().requires_grad_(), LossOptions(-100, *{**_DEFAULTS, **given}.values(), "none", None)
    wanted = row_losses(capped(wide, options.softcap), torch.tensor(targets), options)
    torch.testing.assert_close(losses.double(), wanted, rtol=2e-6, atol=2e-6)
    (slope,) = torch.autograd.grad(wanted.sum(), wide)
    torch.testing.assert_close(gradient.double(), slope, rtol=1e-5, atol=1e-6)


def test_the_rows_of_a_chunk() -> None:
    half, full = torch.bfloat16, torch.float32
    assert kernels.rows_of_chunk(65536, 4096, 65536, None, None) == 4096  # logits of the size of x
    assert kernels.rows_of_chunk(4096, 512, 32000, None, None) == kernels.LEAST_ROWS
    assert kernels.rows_of_chunk(4096, 512, 32000, None, half) == kernels.SUM_ROWS
    assert kernels.rows_of_chunk(8192, 4096, 128256, None, half) == 4096
    assert kernels.rows_of_chunk(8192, 4096, 128256, None, full) == kernels.SUM_ROWS
    assert kernels.rows_of_chunk(16384, 16384, 128256, None, half) == kernels.MOST_SUM_ROWS
    assert kernels.rows_of_chunk(5000, 4096, 128256, None, half) == 2560  # of two chunks, in tiles of a matmul
    assert kernels.rows_of_chunk(4096, 4096, 128256, None, half) == 2048
    assert kernels.rows_of_chunk(100, 4096, 128256, None, half) == 100
    assert kernels.rows_of_chunk(100, 4096, 128256, 7, half) == 7
    assert kernels.rows_of_chunk(0, 4096, 128256, None, half) == 1


@pytest.mark.parametrize(
    ("dtype", "n_rows", "chunk", "waits"),
    [(torch.bfloat16, 32, None, True), (torch.bfloat16, 33, None, False), (torch.bfloat16, 32, 32, False),
     (torch.float16, 32, None, False), (torch.float32, 32, None, False)],
)  # fmt: skip
def test_the_product_for_weight_waits_for_backward_up_to_2_h_rows(
    dtype: torch.dtype, n_rows: int, chunk: int | None, waits: bool
) -> None:
    """As float32, the gradient takes no less memory; of float16, factors of backward might be too small."""
    x, weight = torch.randn(n_rows, 16).to(dtype), torch.randn(40, 16).to(dtype).requires_grad_()
    target = torch.randint(40, (n_rows,))
    args = LinearCrossEntropyArgs(x, weight, target, None, -100, 0.0, 0.0, None, "mean", None, chunk)
    with torch.no_grad():
        _, _, dweight, _, dlogits = kernels.linear_cross_entropy(args, True)
        of_a_trace = kernels.linear_cross_entropy(args._replace(weight=weight.detach()), True)
    assert (dweight is None) == (dlogits is not None) == waits
    assert of_a_trace[2] is not None
    assert of_a_trace[4] is None


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # of the flags
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_chunk_takes_its_logits_and_the_gradient_of_weight(reduction: str) -> None:
    """Here 4 V H bytes, and what torch takes beside on a CPU. A sum in float32 takes 4 V H more."""
    x, weight = torch.randn(64, 64).bfloat16().requires_grad_(), torch.randn(2048, 64).bfloat16().requires_grad_()
    target = torch.randint(2048, (64,))
    target[5] = -100
    wide = [x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    losses = torch.nn.functional.cross_entropy(wide[0] @ wide[1].t(), target, reduction=reduction)
    x.data[5] = torch.nan

    def both_ways() -> object:
        losses = fusedops.linear_cross_entropy(x, weight, target, reduction=reduction, backend="triton")
        losses.sum().backward()
        return x.grad

    with torch.backends.mkldnn.flags(enabled=False):  # which rewrites its operands on processors without AVX512-BF16
        assert peak(both_ways, 1) < 7 * weight.numel()
    for got, want in zip((x.grad, weight.grad), torch.autograd.grad(losses.sum(), wide)):
        assert got is not None
        assert (got.double() - want).norm() < 0.01 * want.norm()


@pytest.mark.parametrize("right", [True, False])
def test_a_product_that_adds_must_give_the_sum(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.8 and 2.9 raise no error, and read memory that was not written."""

    def mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, out: torch.Tensor) -> None:
        out.copy_(a.to(out_dtype) @ b.to(out_dtype))

    def addmm(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, out: torch.Tensor) -> None:
        out.copy_(total + a.to(out_dtype) @ b.to(out_dtype) if right else a.to(out_dtype) @ b.to(out_dtype))

    monkeypatch.setattr(kernels.torch, "mm", mm)
    monkeypatch.setattr(kernels.torch, "addmm", addmm)
    kernels.adds_wide.cache_clear()
    try:
        assert kernels.adds_wide(torch.device("cpu"), torch.bfloat16) is right
    finally:
        kernels.adds_wide.cache_clear()


@pytest.mark.parametrize("size", [1, 100, 4096, 4099])
@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_scaled_rounds_once(size: int, wanted: int) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    value, factor = torch.randn(3, size), torch.tensor(0.3)
    product = (value * factor).to(dtypes[wanted])
    for reuse in (False, True):
        before = value.clone()
        got = scaled(value, factor, dtypes[wanted], reuse)
        assert torch.equal(got, product)
        assert (got is value) == (reuse and wanted == 0)
        assert got is value or torch.equal(value, before)
