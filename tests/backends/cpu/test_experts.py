"""experts in the compiled library: what its blocks, its panels and its threads must not change."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.quantization import Packed

pytestmark = pytest.mark.usefixtures("on_cpu", "one_thread")


def routed(tokens: int, width: int, inner: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return a call in which most tokens choose expert 0, few expert 1, and none expert 2."""
    generator = torch.Generator().manual_seed(tokens)
    x, up, down = (
        torch.randn(*shape, generator=generator) / shape[-1] ** 0.5
        for shape in ((tokens, width), (4, 2 * inner, width), (4, width, inner))
    )
    index = torch.zeros(tokens, 2, dtype=torch.int64)
    index[::40, 0], index[:, 1], index[1::3, 1] = 1, 3, -1
    return x, index, torch.rand(tokens, 2, generator=generator), up, down


@pytest.mark.parametrize("transposed", [False, True])
def test_a_panel_of_pieces_of_several_sizes(transposed: bool) -> None:
    x, index, weights, up, down = routed(700, 150, 40)
    results: list[tuple[Tensor, ...]] = []
    for backend, dtype in (("cpu", torch.float32), ("eager", torch.float64)):
        given = [each.to(dtype).requires_grad_() for each in (x, weights, up, down)]
        matrices = [each.mT for each in given[2:]] if transposed else given[2:]
        y = fusedops.experts(given[0], index, given[1], *matrices, transposed=transposed, backend=backend)
        results.append((y, *torch.autograd.grad(y.square().sum(), given)))
    for got, expected in zip(*results):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.detach().abs().max()))


def test_the_bits_of_a_token_depend_on_it_alone() -> None:
    x, index, weights, up, down = routed(600, 301, 71)
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [each.to(dtype) for each in (up, down)]
        y = fusedops.experts(x.to(dtype), index, weights, *tensors, backend="cpu")
        for rows in (slice(0, 1), slice(8, 10), slice(7, 12), slice(40, 100), slice(599, 600)):
            alone = fusedops.experts(x[rows].to(dtype), index[rows], weights[rows], *tensors, backend="cpu")
            assert alone.equal(y[rows])


def mxfp4(format: str, power: int, *shape: int) -> Packed:
    """Return experts whose scales take turns along a row: 2^(power - 127) and half of it."""
    *rows, columns = shape
    generator = torch.Generator().manual_seed(power)
    codes = torch.randint(256, (*rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
    if power < 3:
        codes |= 0x44  # those of which no number is below 2^-126
    if power == 255:
        codes &= 0x99  # 0 and 0.5, which are finite with GGUF's power, and NaN with the Hub's
    scales = torch.tensor([power, max(power - 1, 0)], dtype=torch.uint8).repeat(columns // 32)[: columns // 32]
    scales = scales.expand(*rows, -1).contiguous()
    if format == "MXFP4":
        return Packed(format, codes.flatten(-2), scales, shape=shape)
    return Packed(format, torch.cat([scales[..., None], codes], -1).flatten(-2), shape=shape)


@pytest.mark.parametrize("power", [0, 1, 2, 3, 127, 252, 253, 254, 255])
@pytest.mark.parametrize("format", ["MXFP4", "MXFP4_GGUF"])
def test_codes_of_mxfp4_in_bfloat16(format: str, power: int) -> None:
    """Each power of two, of few rows and of many, of several slices of terms; a token's bits are those it has alone."""
    x, index, weights, _, _ = routed(90, 544, 96)
    x = (x * 2.0 ** max(-100, min(100, 127 - power))).bfloat16()
    up, down = mxfp4(format, power, 4, 96, 544), mxfp4(format, 120, 4, 544, 96)
    call = [x, index, weights, up, down]
    y, wanted = (fusedops.experts(*call, activation="relu", backend=of).float() for of in ("cpu", "eager"))
    assert bool(wanted[wanted.isfinite()].any()) == (power < 253 or (power == 255 and format == "MXFP4_GGUF"))
    torch.testing.assert_close(y.isnan(), wanted.isnan())
    y, wanted = (each.nan_to_num(0, 0, 0) for each in (y, wanted))
    assert float((y - wanted).norm()) <= 4e-3 * float(wanted.norm())
    for rows in (slice(0, 1), slice(40, 42), slice(7, 30)):
        alone = fusedops.experts(x[rows], index[rows], weights[rows], up, down, activation="relu", backend="cpu")
        torch.testing.assert_close(alone.float().nan_to_num(0, 0, 0), y[rows], rtol=0, atol=0)


@pytest.mark.parametrize(("tokens", "inner"), [(600, 71), (24, 330)])
def test_the_bits_do_not_depend_on_threads(tokens: int, inner: int) -> None:
    """Of few tokens, a block has 256, 128 and 64 columns."""
    x, index, weights, up, down = routed(tokens, 301, inner)
    results: list[list[Tensor]] = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        given = [each.clone().requires_grad_() for each in (x, weights, up, down)]
        y = fusedops.experts(given[0], index, *given[1:], backend="cpu")
        results.append([y, *torch.autograd.grad(y.sum(), given)])
    assert all(one.equal(other) for each in results[1:] for one, other in zip(results[0], each))


_BACKWARD = """
import torch
from benchmarks.memory import resident_peak_bytes
from fusedops import experts
torch.set_num_threads(2)
x, up, down = (torch.randn(s, requires_grad=True) for s in ((2048, 1024), (16, 128, 1024), (16, 1024, 64)))
index, weights = torch.rand(2048, 16).argsort(-1)[:, :8], torch.rand(2048, 8)
gradients = lambda y: torch.autograd.grad(y, (x, up, down), torch.ones_like(y))
gradients(experts(x, index, weights, up, down, backend="cpu"))
y = experts(x, index, weights, up, down, backend="cpu")
print(resident_peak_bytes(lambda: gradients(y)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: it tells the largest memory of a process")
def test_the_backward_pass_keeps_no_gradient_of_each_choice() -> None:
    """The gradients take 20 MiB, ones 8, a panel 16; the gradients of inputs of all choices would take 64."""
    given = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", _BACKWARD], check=True, capture_output=True, text=True, env=given)
    assert int(done.stdout) < 64 * 2**20
