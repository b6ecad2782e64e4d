"""The ops on a GPU: ``make gpu`` runs this there, without the root conftest. Everywhere else it is skipped.

GPU_TESTS_ON=cpu under TRITON_INTERPRET=1 runs those that need no CUDA, smaller.
"""

from __future__ import annotations

import threading

import pytest
import torch
from gpu_calls import CUDA, DEVICE, HERE, SOFTMAX, assert_right, of_backends, results, small_cases, softmax_of
from torch import Tensor

import fusedops
from fusedops import Case, Op, testing

if not HERE:
    pytest.skip("needs a GPU: `make gpu` runs these", allow_module_level=True)

ELEMENTS = 2**20 if CUDA else 2**11
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BACKENDS = [pytest.param(backend, op, id=f"{backend}-{op.name}") for backend, op in of_backends()]
CASES = [
    pytest.param(backend, op, case, id=f"{backend}-{op.name}-{case.name}")
    for backend, op in of_backends()
    for case in op.evidence.cases
]
on_cuda = pytest.mark.skipif(not CUDA, reason="needs CUDA")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(("backend", "op", "case"), CASES)
def test_numbers_against_float64_and_two_runs_alike(backend: str, op: Op, case: Case, dtype: torch.dtype) -> None:
    args = testing.arguments(op, testing.shrunk(case, ELEMENTS), dtype, DEVICE)
    decision = fusedops.explain(op.name, **dict(zip(op.parameters, args)), backend=backend)
    if decision.backend != backend or decision.backward != backend:
        refusal = next(one for one in decision.candidates if one.backend == backend)
        pytest.skip(f"{backend} does not take this call: {refusal.notes or 'its backward'}")
    with fusedops.use(backend, fallback="raise"):
        want = testing.expected(op, args)
        first = assert_right(op, args, want)
        outputs, gradients = results(op, args, want)
    if backend == "triton":  # gradients of other libraries' attention are sums in any order
        again = (*(y for y in outputs if y is not None), *gradients.values())
        for one, other in zip(first, again, strict=True):  # a float16 result may overflow
            assert torch.equal(one.isnan(), other.isnan())
            assert torch.equal(one.nan_to_num(0.0), other.nan_to_num(0.0))


@pytest.mark.parametrize("width", [64, 100, 257, 1000, 1024, 4096, 8200, 16384, 40000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_any_layout(dtype: torch.dtype, width: int) -> None:
    """Misaligned, transposed and expanded tensors have the answer of their contiguous copies.

    Within the tolerance where a row is summed: a thread of a misaligned row has one element at a time, of an aligned
    one 4 or 8, so the order of the sum differs. Elementwise ops have the same bits.
    """
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
        testing.assert_within(
            softmax_of(x, m).cpu(), plain.double().cpu(), SOFTMAX.evidence.tolerance[dtype], "softmax"
        )
        norm, allowed = fusedops.rms_norm(x.contiguous()), testing.OPS["rms_norm"].evidence.tolerance[dtype]
        testing.assert_within(fusedops.rms_norm(x).cpu(), norm.double().cpu(), allowed, "rms_norm")
    x, bias = base[..., 1 : width + 1], base[0, 0, 0, 3:]
    assert torch.equal(fusedops.swiglu(x, base[..., 3:]), fusedops.swiglu(x.contiguous(), base[..., 3:].contiguous()))
    assert torch.equal(fusedops.bias_gelu(x, bias), fusedops.bias_gelu(x.contiguous(), bias.clone()))
    y = fusedops.bias_dropout_add(x, bias, base[..., :width], 0.3, seed=5)
    assert torch.equal(
        y, fusedops.bias_dropout_add(x.contiguous(), bias.clone(), base[..., :width].contiguous(), 0.3, seed=5)
    )


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
        SOFTMAX.evidence.tolerance[torch.float32],
        "softmax on cuda:1",
    )


@on_cuda
@pytest.mark.parametrize(("backend", "op"), [each for each in BACKENDS if each.values[0] == "triton"])
def test_memory_beside_the_result(backend: str, op: Op) -> None:
    """Nothing of x's size is made beside the results; a mask is never expanded."""
    if op.name in ("linear_cross_entropy", "experts"):
        pytest.skip("needs a chunk of logits, or the rows of the chosen experts, beside its result")
    args = testing.arguments(op, op.evidence.measured[0], torch.bfloat16, DEVICE)
    op.call_public(*args)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = op.as_tuple(op.call_public(*args))
    made = sum(y.nbytes for y in outputs if isinstance(y, Tensor))
    workspace = 2**20  # of torch's grouped products
    assert torch.cuda.max_memory_allocated() - before <= 1.02 * made + 0.01 * args[0].nbytes + workspace


@on_cuda
def test_compiled_code_has_the_same_bits() -> None:
    x = torch.randn(2, 4, 64, 256, device=DEVICE)
    mask = torch.rand(2, 1, 64, 256, device=DEVICE) < 0.3
    for mode in ("default", "reduce-overhead"):
        torch.compiler.reset()
        compiled = torch.compile(softmax_of, fullgraph=True, mode=mode)
        for _ in range(3):  # the third is a replay of what the second captured
            assert torch.equal(compiled(x, mask), softmax_of(x, mask)), mode


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("backend", "op"), BACKENDS)
def test_small_calls_for_the_sanitizer(backend: str, op: Op, dtype: torch.dtype) -> None:
    """Every kernel, on sizes that end inside a block: compute-sanitizer runs this one (`make gpu`)."""
    for case in small_cases(op):
        args = testing.arguments(op, case, dtype, DEVICE)
        decision = fusedops.explain(op.name, **dict(zip(op.parameters, args)), backend=backend)
        if decision.backend == decision.backward == backend:
            with fusedops.use(backend, fallback="raise"):
                assert_right(op, args, testing.expected(op, args))


@on_cuda
@pytest.mark.parametrize("long", [20000, 40000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_long_rows_for_the_sanitizer(dtype: torch.dtype, long: int) -> None:
    """Rows that are read twice, and rows of two-byte elements on chip as pairs."""
    softmax_of(torch.randn(2, long, dtype=dtype, device=DEVICE, requires_grad=True)).sum().backward()
    fusedops.rms_norm(torch.randn(2, long, dtype=dtype, device=DEVICE, requires_grad=True)).sum().backward()
