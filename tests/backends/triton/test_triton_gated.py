"""The kernels of the gated activations, run by Triton's interpreter: bytes, layouts that are read where they are.

tests/ops/test_gated.py and the conformance kit compare their numbers with float64.
"""

from __future__ import annotations

import pytest
import torch
from pairwise import pairwise

pytest.importorskip("triton", reason="triton is not installed")

from triton_traffic import Traffic, total

from fusedops.testing import OPS
from fusedops_triton.gated._gated import Gelu, Swish, gated_backward, gated_forward

PLAIN = Swish(None, 1.0, 0.0)


@pytest.mark.parametrize(
    ("function", "width", "form", "dtype"),
    pairwise(
        [PLAIN, Gelu("tanh"), Gelu("erf")],
        [64, 1000, 33],
        ["two", "halves", "interleaved"],
        [torch.bfloat16, torch.float32],
    ),
    ids=str,
)
def test_each_direction_moves_the_fewest_bytes(
    function: Swish | Gelu, width: int, form: str, dtype: torch.dtype, traffic: Traffic
) -> None:
    gate = torch.randn(5, width if form == "two" else 2 * width).to(dtype)
    up = torch.randn(5, width).to(dtype) if form == "two" else None
    fewest = OPS["swiglu"].evidence.min_bytes(gate, up)
    y = gated_forward(gate, up, function, form == "interleaved")
    assert total(traffic) == fewest["forward"]
    gated_backward(y, gate, up, function, form == "interleaved", (True, up is not None))
    assert total(traffic) == fewest["forward"] + fewest["backward"]


def test_chunks_are_read_where_they_are(traffic: Traffic) -> None:
    packed = torch.randn(2, 5, 48)
    gate, up = packed.chunk(2, -1)
    gated_forward(gate, up, PLAIN, False)
    assert traffic.distinct(packed) == packed.nbytes


def test_a_gradient_that_is_not_wanted_is_not_written(traffic: Traffic) -> None:
    gate, up = torch.randn(4, 64), torch.randn(4, 64)
    dgate, dup = gated_backward(gate, gate, up, PLAIN, False, (False, True))
    assert dgate is None
    assert dup is not None
    assert traffic.sizes["stores"] == dup.nbytes
