"""The kernel of linear_cross_entropy in Triton's interpreter: results, bytes, edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from triton_cases import needs_loops
from triton_traffic import Traffic, total

from fusedops.ops.losses.formulas import LossOptions
from fusedops.testing import OPS
from fusedops_triton import _linear_cross_entropy as kernels

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
