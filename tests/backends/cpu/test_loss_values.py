"""The results of cross_entropy: chunks of a row, cuts, special values, large logits, wrong targets."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from cpu_values import DTYPES, rounded
from right import assert_right
from torch import Tensor

import fusedops
from fusedops import testing
from fusedops_cpu.losses import cross_entropy as kernels

pytestmark = pytest.mark.usefixtures("on_cpu")

OP = testing.OPS["cross_entropy"]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "rows": {"reduction": "none", "label_smoothing": 0.1},
    "all": {"label_smoothing": 0.3, "z_loss": 0.01, "softcap": 2.0, "denominator": 7.5},
    "capped": {"softcap": 30.0, "z_loss": 0.1, "reduction": "none"},
    "smooth": {"label_smoothing": 1.0, "ignore_index": 2**62},
}


def test_a_probability_below_the_smallest_normal_number_may_be_zero() -> None:
    logits = torch.tensor([[100.0, 12.5, 0.0]])
    assert_right(
        "cross_entropy", logits, torch.tensor([0]), z_loss=1.0
    )  # the gradient of the second, 2e-36, is a normal number


def targets(logits: Tensor, ignored: int = -100) -> Tensor:
    target = torch.randint(logits.shape[-1], logits.shape[:-1], generator=torch.Generator().manual_seed(2))
    return torch.where(torch.arange(target.numel()).view(target.shape) % 4 == 2, ignored, target)


@pytest.mark.parametrize(
    ("classes", "dtype"), list(zip([1023, 1024, 1025, 2049, 128256], itertools.cycle(DTYPES))), ids=str
)
def test_chunks_of_a_row(classes: int, dtype: torch.dtype) -> None:
    """The largest logit, and the target, in each chunk in turn."""
    logits = rounded((6, classes), dtype)
    target = torch.tensor([0, classes - 1, 1022, min(1023, classes - 1), min(1024, classes - 1), classes // 2])
    for row in range(6):
        logits[row, row * (classes - 1) // 5] = 20 + row
    assert_right("cross_entropy", logits, target, reduction="none")
    assert_right("cross_entropy", logits, target, label_smoothing=0.1, softcap=15.0)
    assert_right(
        "cross_entropy", logits.sort(-1).values, target, reduction="none"
    )  # each chunk has a larger one than those before


@pytest.mark.parametrize("cut", ["positions", "classes", "both", "every second", "expanded"])
def test_cuts_are_read_where_they_are(cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = rounded((3, 8, 80), torch.float32)
    logits = {
        "positions": base[:, :-1],
        "classes": base[..., 3:70],
        "both": base[1:, 2:, :33],
        "every second": base[::2, ::3],
        "expanded": base[:1, :, :20].expand(3, 8, 20),
    }[cut]
    target = targets(logits)
    wanted = fusedops.cross_entropy(logits.contiguous(), target, reduction="none")
    monkeypatch.setattr(Tensor, "contiguous", None)
    assert torch.equal(fusedops.cross_entropy(logits, target, reduction="none"), wanted)
    monkeypatch.undo()
    assert_right("cross_entropy", logits, target)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_special_values(options: dict[str, Any]) -> None:
    """NaN, infinities, and rows of -inf: losses, lse and gradients are finite, infinite or NaN as float64 has them."""
    inf, nan = math.inf, math.nan
    logits = rounded((9, 40), torch.float32)
    for row, (place, value) in enumerate([(3, nan), (3, inf), (3, -inf), (7, inf), (7, -inf), (7, 3e38), (3, -3e38)]):
        logits[row, place] = value
    logits[7] = -inf
    logits[8, 3:5] = torch.tensor([nan, inf])
    target = torch.full((9,), 3)
    options = {**options, "reduction": "none", "denominator": None}
    args = OP.prepared(OP.bind((logits, target), options))
    forward, backward = kernels.cross_entropy.call, kernels.cross_entropy_backward.call
    loss, lse, _ = forward(*args, True)
    wide = (logits.double(), *args[1:])
    want_lse = OP.saved[0].reference(wide[0], target, wide[2], wide[5])
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(loss.double(), OP.reference(*wide), rtol=1e-5, atol=1e-5, equal_nan=True)
    got = backward(torch.ones(9), logits, None, lse, *args[1:])
    want = OP.backward(torch.ones(9), wide[0], None, want_lse, *args[1:])
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("offset", [1e4, -3e5])
def test_logits_that_are_large_beside_the_loss(offset: float) -> None:
    """Differences are taken before sums: the loss is as exact as that of the logits without the offset."""
    logits = (rounded((5, 3000), torch.float32) * 64).round() / 32 + offset
    target = targets(logits)
    for smoothing in (0.0, 0.1):
        got = fusedops.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)
        want = torch.nn.functional.cross_entropy(logits.double(), target, reduction="none", label_smoothing=smoothing)
        torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("denominator", [3, 0.0, -2.0, 3e38, torch.tensor([2.5], dtype=torch.bfloat16)])
def test_denominators(denominator: Any) -> None:
    logits = rounded((5, 30), torch.float32)
    target = targets(logits)
    results = [
        fusedops.cross_entropy(logits, target, denominator=denominator, backend=backend) for backend in ("cpu", "eager")
    ]
    torch.testing.assert_close(*results)
