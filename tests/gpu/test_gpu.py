"""The Triton backend where a GPU is needed: ``make gpu`` runs this there, without the root conftest.

Everywhere else it is skipped. (GPU_TESTS_ON=cpu under TRITON_INTERPRET=1 tries those that need no CUDA, smaller.)
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

import fusedops
from fusedops import testing
from fusedops.philox import philox, threshold
from fusedops.testing import Case

if TYPE_CHECKING:
    from fusedops import Op

DEVICE = os.environ.get("GPU_TESTS_ON", "cuda")
CUDA = DEVICE == "cuda"
if CUDA and (os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available()):
    pytest.skip("needs a GPU: `make gpu` runs these", allow_module_level=True)

ELEMENTS = 2**23 if CUDA else 2**11
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CASES = [pytest.param(op, case, id=f"{op.name}-{case.name}") for op in testing.OPS.values() for case in op.cases]
on_cuda = pytest.mark.skipif(not CUDA, reason="needs CUDA")


@pytest.fixture(autouse=True)
def only_triton() -> Iterator[None]:
    with fusedops.use("triton", fallback="raise"):
        yield
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def call(op: Op, args: tuple[Any, ...]) -> torch.Tensor:
    return getattr(fusedops, op.name)(**dict(zip(op.parameters, args)))


def results(op: Op, args: tuple[Any, ...], want: testing.Expected) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The output and the gradients, by parameter name."""
    leaves = [
        arg.detach().requires_grad_() if name in want.gradients else arg for name, arg in zip(op.parameters, args)
    ]
    y = call(op, tuple(leaves))
    inputs = [leaves[op.parameters.index(name)] for name in want.gradients]
    return y.detach(), dict(zip(want.gradients, torch.autograd.grad(y, inputs, want.grad.to(y.dtype).to(y.device))))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(("op", "case"), CASES)
def test_numbers_against_float64_and_two_runs_alike(op: Op, case: Case, dtype: torch.dtype) -> None:
    args = testing.arguments(op, testing.shrunk(case, ELEMENTS), dtype, DEVICE)
    want = testing.expected(op, args)
    y, gradients = results(op, args, want)
    testing.assert_within(y, want.y, op.tolerance[dtype], op.name)
    for name, gradient in want.gradients.items():
        # dbias is a sum: its rounding grows with the rows, of which there are more here than in the op's own cases
        allowed = op.gradient_tolerance[dtype]
        scale = max(1.0, float(gradient.abs().max()))
        testing.assert_within(gradients[name] / scale, gradient / scale, allowed, f"gradient of {name}")
    again, gradients_again = results(op, args, want)
    assert torch.equal(y, again)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients_again[name]), f"gradient of {name} differs from run to run"


def softmax_of(x: torch.Tensor, mask: torch.Tensor | None = None, causal: bool = False) -> torch.Tensor:
    return fusedops.scaled_masked_softmax(x, mask, 0.125, causal=causal)


@pytest.mark.parametrize("width", [64, 100, 257, 1000, 1024, 4096, 8200, 16384, 40000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_any_layout(dtype: torch.dtype, width: int) -> None:
    """Misaligned, transposed and expanded tensors have the answer of their contiguous copies."""
    width = width if CUDA else min(width, 300)
    base = torch.randn(2, 3, 5, width + 3, dtype=dtype, device=DEVICE)
    mask = torch.rand(2, 1, 5, width + 1, device=DEVICE) < 0.3
    for x, m in (
        (base[..., 1 : width + 1], mask[..., 1:]),
        (base[..., 3:], mask[:1, :, :1, 1:].expand(2, 1, 5, width)),
        (base.transpose(1, 2)[..., :width].transpose(1, 2), mask[..., :width]),
        (base[..., :width].transpose(-1, -2).contiguous().transpose(-1, -2), None),
        (base[:1, :1, :, :width].expand(2, 3, 5, width), mask[..., 1:]),
    ):
        plain = softmax_of(x.contiguous(), None if m is None else m.contiguous())
        assert torch.equal(softmax_of(x, m), plain)
    x, bias = base[..., 1 : width + 1], base[0, 0, 0, 3:]
    assert torch.equal(fusedops.bias_gelu(x, bias), fusedops.bias_gelu(x.contiguous(), bias.clone()))
    y = fusedops.bias_dropout_add(x, bias, base[..., :width], 0.3, seed=5)
    assert torch.equal(
        y, fusedops.bias_dropout_add(x.contiguous(), bias.clone(), base[..., :width].contiguous(), 0.3, seed=5)
    )


@on_cuda
def test_more_elements_than_32_bits_count() -> None:
    """The rows behind 2**31 elements, and behind 2**31 bytes, are as good as the first."""
    rows, width = 2**21 + 64, 1024
    x = torch.randn(64, width, dtype=torch.bfloat16, device=DEVICE).repeat(rows // 64, 1)
    grad = torch.randn(64, width, dtype=torch.bfloat16, device=DEVICE).repeat(rows // 64, 1)
    assert x.numel() > 2**31

    def alike(y: torch.Tensor, what: str) -> None:
        first = y[:64]
        for start in (rows // 2, rows - 64):
            assert torch.equal(y[start // 64 * 64 :][:64], first), what

    leaf = x.view(1, 1, rows, width).requires_grad_()
    y = softmax_of(leaf)
    alike(y.detach()[0, 0], "softmax")
    small = torch.softmax(x[:64].detach().double() * 0.125, -1)
    testing.assert_within(y[0, 0, :64], small.cpu(), testing.OPS["scaled_masked_softmax"].tolerance[x.dtype], "softmax")
    alike(torch.autograd.grad(y, leaf, grad.view_as(y))[0][0, 0], "gradient of softmax")
    del leaf, y
    bias = torch.randn(width, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    leaf = x.detach().requires_grad_()
    y = fusedops.bias_gelu(leaf, bias)
    alike(y.detach(), "bias_gelu")
    dx, dbias = torch.autograd.grad(y, (leaf, bias), grad)
    alike(dx, "gradient of bias_gelu")
    del y, leaf
    wide = dx[:64].double().sum(0) * (rows // 64)
    assert ((dbias.double() - wide).abs() <= 0.02 * wide.abs() + 0.02 * wide.abs().mean()).all()
    del dx
    y = fusedops.bias_dropout(torch.ones_like(x), None, 0.5, seed=7)
    tail = torch.arange((y.numel() - 4096) // 4, y.numel() // 4)
    words = torch.stack(philox(tail, torch.tensor([7])), -1).flatten()
    assert torch.equal(y.view(-1)[-4096:].cpu() != 0, words >= threshold(0.5))


@on_cuda
def test_cuda_graphs() -> None:
    """Captured once, replayed with other numbers: forward, backward, and fresh dropout masks for each replay."""
    x = torch.randn(2, 4, 64, 256, device=DEVICE, requires_grad=True)
    mask = torch.rand(2, 1, 64, 256, device=DEVICE) < 0.3
    h = torch.randn(512, 256, device=DEVICE)
    bias = torch.randn(256, device=DEVICE, requires_grad=True)

    def step() -> tuple[torch.Tensor, ...]:
        y = softmax_of(x, mask)
        u = fusedops.bias_gelu(h, bias)
        d = fusedops.bias_dropout_add(u, bias, h, 0.5)
        return y, u, d, *torch.autograd.grad(y.square().sum() + u.square().sum(), (x, bias))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    masks = []
    for _ in range(2):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            h.copy_(torch.randn_like(h))
        graph.replay()
        masks.append((captured[2] - h) != 0)
        y, u, _, dx, dbias = step()
        for got, want in zip((captured[0], captured[1], captured[3], captured[4]), (y, u, dx, dbias)):
            assert torch.equal(got, want)
    assert not torch.equal(*masks)


@on_cuda
def test_two_streams_and_two_threads() -> None:
    x = torch.randn(4, 8, 256, 1024, device=DEVICE)
    mask = torch.rand(4, 1, 256, 1024, device=DEVICE) < 0.3
    want = softmax_of(x, mask)
    torch.cuda.synchronize()
    found: list[torch.Tensor] = []

    def work() -> None:
        with fusedops.use("triton", fallback="raise"), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                y = softmax_of(x, mask)
            torch.cuda.current_stream().synchronize()
            found.append(y)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert all(torch.equal(y, want) for y in found)


@pytest.mark.skipif(not CUDA or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one() -> None:
    x = torch.randn(2, 4, 64, 256)
    testing.assert_within(
        softmax_of(x.to("cuda:1")),
        torch.softmax(x.double() * 0.125, -1),
        testing.OPS["scaled_masked_softmax"].tolerance[torch.float32],
        "softmax on cuda:1",
    )


@on_cuda
@pytest.mark.parametrize("name", list(testing.OPS))
def test_memory_beside_the_result(name: str) -> None:
    """Nothing of x's size is made beside the result; a mask is never expanded."""
    op = testing.OPS[name]
    shapes: dict[str, Any] = {"x": (4, 16, 512, 1024)}
    shapes |= {"mask": (4, 1, 512, 1024)} if name == "scaled_masked_softmax" else {"bias": (1024,)}
    if "residual" in op.parameters:
        shapes["residual"] = shapes["x"]
    args = testing.arguments(op, Case("memory", shapes), torch.bfloat16, DEVICE)
    call(op, args)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = call(op, args)
    assert torch.cuda.max_memory_allocated() - before <= 1.02 * y.nbytes


@on_cuda
def test_compiled_code_has_the_same_bits() -> None:
    x = torch.randn(2, 4, 64, 256, device=DEVICE)
    mask = torch.rand(2, 1, 64, 256, device=DEVICE) < 0.3
    for mode in ("default", "reduce-overhead"):
        torch.compiler.reset()
        compiled = torch.compile(softmax_of, fullgraph=True, mode=mode)
        for _ in range(3):  # the third is a replay of what the second captured
            assert torch.equal(compiled(x, mask), softmax_of(x, mask)), mode


def test_small_calls_for_the_sanitizer() -> None:
    """Every kernel once, on sizes that end inside a block: compute-sanitizer runs this one (`make gpu`)."""
    for op in testing.OPS.values():
        for width in (33, 1000):
            shapes: dict[str, Any] = {"x": (3, 7, width)}
            shapes |= {"mask": (3, 1, width)} if op.name == "scaled_masked_softmax" else {"bias": (width,)}
            if "residual" in op.parameters:
                shapes["residual"] = shapes["x"]
            args = testing.arguments(op, Case("small", shapes), torch.float32, DEVICE)
            want = testing.expected(op, args)
            y, gradients = results(op, args, want)
            testing.assert_within(y, want.y, op.tolerance[torch.float32], op.name)
            for name, gradient in want.gradients.items():
                testing.assert_within(gradients[name], gradient, op.gradient_tolerance[torch.float32], name)
    for long in (20000, 40000) if CUDA else ():
        softmax_of(torch.randn(2, long, device=DEVICE, requires_grad=True)).sum().backward()
