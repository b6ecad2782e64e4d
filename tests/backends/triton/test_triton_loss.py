"""The kernels of cross entropy, run by Triton's interpreter: bytes, views that are read where they are, sums of rows.

tests/ops/test_cross_entropy.py and the conformance kit compare their numbers.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from triton_traffic import Traffic, total

from fusedops.ops.losses.formulas import LossOptions, capped, row_losses
from fusedops.testing import OPS
from fusedops_triton.losses._cross_entropy import cross_entropy_forward, logits_gradient

PLAIN = LossOptions(-100, 0.0, 0.0, None, "mean", None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "options", [PLAIN, LossOptions(-100, 0.1, 0.1, 5.0, "sum", None), PLAIN._replace(reduction="none")]
)
@pytest.mark.parametrize("classes", [1000, 20001])
def test_each_direction_moves_hardly_more_than_the_fewest_bytes(
    classes: int, options: LossOptions, dtype: torch.dtype, traffic: Traffic
) -> None:
    logits, target = torch.randn(4, classes).to(dtype), torch.randint(classes, (4,))
    fewest = OPS["cross_entropy"].evidence.min_bytes(logits, target, *options)
    loss, lse = cross_entropy_forward(logits, target, options, True)
    forward = total(traffic)
    assert forward <= 1.05 * fewest["forward"]
    assert lse is not None
    logits_gradient(torch.ones_like(loss), logits, lse, target, options)
    # each program of a row reads its target and lse again
    assert total(traffic) - forward <= 1.05 * fewest["backward"]


def test_the_logits_of_ignored_rows_are_not_read(traffic: Traffic) -> None:
    logits, target = torch.randn(4, 20001), torch.tensor([3, -100, 7, -100])
    _, lse = cross_entropy_forward(logits, target, PLAIN, True)
    assert traffic.distinct(logits) == logits.nbytes // 2
    assert lse is not None
    traffic.loads.clear()
    logits_gradient(torch.ones(()), logits, lse, target, PLAIN)
    assert traffic.distinct(logits) == logits.nbytes // 2


@pytest.mark.parametrize("cut", ["rows", "classes", "both"])
def test_views_are_read_where_they_are(cut: str, traffic: Traffic) -> None:
    whole = torch.randn(3, 5, 64)
    logits = {"rows": whole[:, :-1], "classes": whole[..., :50], "both": whole[:, 1:, :33]}[cut]
    target = torch.randint(33, logits.shape[:-1])
    cross_entropy_forward(logits, target, PLAIN, True)
    assert traffic.distinct(logits) == logits.numel() * logits.element_size()


@pytest.mark.parametrize("count", [1, 1023, 1025, 5000])
def test_the_sum_of_many_rows(count: int) -> None:
    logits, target = torch.randn(count, 4), torch.randint(-1, 4, (count,))
    loss, _ = cross_entropy_forward(logits, target, PLAIN._replace(ignore_index=-1), False)
    wanted = torch.nn.functional.cross_entropy(logits, target, ignore_index=-1) if (target >= 0).any() else loss * 0
    torch.testing.assert_close(loss, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "options", [PLAIN._replace(reduction="none"), LossOptions(-100, 0.1, 0.1, 5.0, "none", None)], ids=["plain", "all"]
)
@pytest.mark.parametrize(("classes", "first"), [(8193, 0), (9001, 3), (10240, 0), (16390, 1)])
def test_rows_that_begin_anywhere(classes: int, first: int, options: LossOptions, dtype: torch.dtype) -> None:
    """The columns before and after the 16-byte accesses of a long row count too, and none of its neighbours'."""
    generator = torch.Generator().manual_seed(classes)
    memory = torch.randn(first + 9 * classes, generator=generator).to(dtype)
    logits = memory[first:].view(9, classes)
    target = torch.tensor([0, classes - 1, 6, -100, classes - 8, 7, classes, 8, classes // 2])
    for row in (0, 1, 4):
        logits[row, target[row]] = 30.0  # most of the sum
    for row in (2, 7):
        logits[row, [0, -1]] = 20.0
    got, lse = cross_entropy_forward(logits, target, options, True)
    assert lse is not None
    known = target.where(target < classes, -100)
    for part in (slice(None), slice(0, 1), slice(8, 9)):  # a row alone: nothing before it, nothing after it
        wanted = row_losses(capped(logits[part].double(), options.softcap), known[part], options)
        wanted[target[part] == classes] = float("nan")
        torch.testing.assert_close(got[part].double(), wanted, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("classes", [9000, 9001])
def test_the_infinities_of_a_long_row(classes: int) -> None:
    logits, inf = torch.randn(5, classes), float("inf")
    logits[0], logits[1, 5:], logits[2, 8500] = -inf, -inf, inf
    logits[3, -1] = float("nan")
    loss, _ = cross_entropy_forward(logits, torch.tensor([1, 2, 3, 4, 5]), PLAIN._replace(reduction="none"), False)
    wanted = torch.nn.functional.cross_entropy(logits, torch.tensor([1, 2, 3, 4, 5]), reduction="none")
    assert loss[[0, 2, 3]].isnan().all()
    torch.testing.assert_close(loss, wanted, rtol=2e-6, atol=2e-6, equal_nan=True)
