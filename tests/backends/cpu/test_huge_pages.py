"""Large results are marked for huge pages where Linux has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import fusedops

SMAPS, SETTING = Path("/proc/self/smaps"), Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = pytest.mark.skipif(not (SMAPS.exists() and SETTING.exists()), reason="needs Linux with huge pages")


def is_marked(tensor: Tensor) -> bool:
    """Return True where the middle of a tensor's memory is marked for huge pages."""
    middle, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in SMAPS.read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            begin, end = (int(address, 16) for address in first.split("-"))
            inside = begin <= middle < end
        elif inside and first == "VmFlags:":
            return "hg" in rest.split()
    raise AssertionError("no mapping has the tensor")


def test_a_result_of_8_mib_is_in_huge_pages() -> None:
    large = torch.randn(2**10, 2**11 + 8)
    with fusedops.use("cpu", fallback="raise"):
        y = fusedops.bias_gelu(large)
    assert is_marked(y)
    torch.testing.assert_close(y, torch.nn.functional.gelu(large, approximate="tanh"), atol=2e-6, rtol=1e-5)


def test_both_halves_of_a_packed_gradient_are_in_huge_pages() -> None:
    packed = torch.randn(2**10, 2**14).requires_grad_()
    with fusedops.use("cpu", fallback="raise"):
        (gradient,) = torch.autograd.grad(fusedops.swiglu(packed).sum(), packed)
    assert is_marked(gradient)
    gate, up = packed.detach().chunk(2, -1)
    s = torch.sigmoid(gate)
    torch.testing.assert_close(gradient, torch.cat((up * s * (1 + gate * (1 - s)), gate * s), -1), atol=1e-5, rtol=1e-5)
