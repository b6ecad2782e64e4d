"""rotary_embedding of eager: slabs, memory, and the path for interleaved pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from eager_memory import peak
from torch import Tensor

import fusedops
from fusedops import testing
from fusedops_eager import _rotary, _slabs

OP = testing.OPS["rotary_embedding"]
every_pairing = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("rotated", [32, 12])
@pytest.mark.parametrize("shape", [(2, 3, 37, 32), (5, 33), (3, 2, 1, 9, 40)], ids=str)
@every_pairing
def test_slabs_do_not_change_the_result(
    interleaved: bool, shape: tuple[int, ...], rotated: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(shape if len(shape) > 2 else (1, *shape)).to(dtype)
    cos, sin = torch.randn(x.shape[-2], rotated // 2), torch.randn(x.shape[-2], rotated // 2)
    layouts: list[Callable[[Tensor], Tensor]] = [
        lambda t: t,
        lambda t: t.mT.contiguous().mT,
        lambda t: torch.nn.functional.pad(t, (1, 2))[..., 1:-2],  # pairs that are no complex numbers in memory
    ]
    for layout in layouts:
        for sign in (1, -1):
            whole = _rotary.rotate(layout(x), cos, sin, interleaved, -2, sign)
            monkeypatch.setattr(_slabs, "SLAB", 64)
            cut = _rotary.rotate(layout(x), cos, sin, interleaved, -2, sign)
            monkeypatch.undo()
            # the vectors and the rest of a product of complex numbers may be rounded differently
            assert torch.equal(whole, cut) or interleaved
            torch.testing.assert_close(whole, cut, rtol=torch.finfo(dtype).eps, atol=1e-6)
            want = OP.reference(x.double(), None, cos.double(), sign * sin.double(), interleaved, -2)[0]
            unit = torch.finfo(dtype).eps
            torch.testing.assert_close(whole.double(), want, rtol=unit, atol=1e-6)


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


@every_pairing
def test_bits_do_not_depend_on_the_threads(interleaved: bool) -> None:
    args: tuple[Any, ...] = (torch.randn(2, 8, 300, 128), None, torch.randn(300, 32), torch.randn(300, 32))
    found: list[Tensor] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(fusedops.rotary_embedding(*args, interleaved=interleaved, backend="eager")[0])
    torch.set_num_threads(1)
    assert torch.equal(*found)
