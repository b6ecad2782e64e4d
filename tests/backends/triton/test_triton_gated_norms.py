"""gated_rms_norm on Triton in the interpreter: several parts of sums, rows that are read again or are too long."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from right import assert_right

pytest.importorskip("triton", reason="triton is not installed")

from triton_cases import needs_loops

import fusedops
from fusedops_triton.norms import _norm_settings

BF16, F32 = torch.bfloat16, torch.float32


def call_of(shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = (F32,) * 3, **options: Any) -> dict[str, Any]:
    """Return a call; dtypes: of x, gate and weight."""
    numbers, names = torch.Generator().manual_seed(0), ("x", "gate", "weight")
    shapes = (shape, shape, shape[-1:])
    made = {name: torch.randn(each, generator=numbers).to(dtype) for name, each, dtype in zip(names, shapes, dtypes)}
    return {**made, **options}


def check(call: dict[str, Any]) -> None:
    with fusedops.use("triton", fallback="raise"):
        assert_right("gated_rms_norm", **call)


@needs_loops
@pytest.mark.parametrize("gate_first", [False, True])
def test_several_tiles_in_several_parts_give_one_sum(gate_first: bool) -> None:
    """Groups of 1,024 columns, of which a program holds one row at a time: 70 rows are five parts of 14 steps."""
    setting = _norm_settings.gated_norm_sums(70, 1024, 2, 4, sums=True)
    assert (setting.rows, setting.steps) == (1, 14)
    check(call_of((70, 2048), groups=2, gate_first=gate_first))


@needs_loops
def test_a_row_whose_x_is_read_again_is_that_of_the_definition() -> None:
    assert _norm_settings.gated_norm_sums(34, 4100, 1, 2, sums=True, gate_first=True).again == (True, False)
    check(call_of((34, 4100), (BF16,) * 3, gate_first=True))


def test_a_row_that_is_too_long_goes_to_the_next_backend() -> None:
    x = torch.randn(2, 8193)
    with fusedops.use("triton,eager", fallback="silent"):
        decision = fusedops.explain("gated_rms_norm", x, x)
    assert decision.backend == "eager"
    assert "dim -1 of x = 8193, expected a size of at most 8192" in str(decision)
