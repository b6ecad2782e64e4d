"""rotary_embedding of eager: slabs, memory, and the path for interleaved pairs."""

from __future__ import annotations

import pytest
import torch
from eager_memory import peak

from fusedops import testing
from fusedops_eager.rotary import _rotary

OP = testing.OPS["rotary_embedding"]
every_pairing = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


@every_pairing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_memory(dtype: torch.dtype, interleaved: bool) -> None:
    x = torch.randn(2, 16, 2048, 128).to(dtype)
    cos, sin = torch.randn(2048, 64), torch.randn(2048, 64)
    assert peak(lambda: OP.evidence.unfused(x, None, cos, sin, interleaved, -2), x.nbytes) > 1.9
    # the result, tables of a 32nd of x in float32, and buffers of a sixteenth of it
    assert peak(lambda: _rotary.rotate(x, cos, sin, interleaved, -2), x.nbytes) < (1.15 if dtype.itemsize == 4 else 1.3)


@every_pairing
def test_the_path_without_complex_numbers_agrees(interleaved: bool) -> None:
    """Devices other than the CPU have it."""
    x, cos, sin = torch.randn(2, 3, 9, 16), torch.randn(9, 6), torch.randn(9, 6)
    for sign in (1, -1):
        out = torch.empty_like(x)
        _rotary._on_device(out, x, cos[:, None].transpose(0, 1), sin[:, None].transpose(0, 1), interleaved, sign)
        torch.testing.assert_close(out, _rotary.rotate(x, cos, sin, interleaved, -2, sign), rtol=1e-6, atol=1e-6)
