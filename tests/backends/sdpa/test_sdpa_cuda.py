"""sdpa on CUDA: its limits by specs, and its calls of torch's functions on a stand-in for them. No GPU is needed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import sdpa_standin
import torch
from attention_calls import served_calls
from right import assert_right
from sdpa_standin import CUDNN, NAME, Call
from torch import Tensor

import fusedops
from fusedops import TensorSpec, attention
from fusedops_sdpa import attention_cuda

BF16 = torch.bfloat16
FLASH, EFFICIENT = ["flash", "flash_backward"], ["efficient", "efficient_backward"]


def qkv(dtype: torch.dtype = BF16, sq: int = 6, sk: int = 6, nk: int = 2, d: int = 16) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(sq + sk)
    return tuple(torch.randn(2, n, s, d, generator=generator).to(dtype) for n, s in ((4, sq), (nk, sk), (nk, sk)))


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


@pytest.fixture
def log() -> Iterator[list[Call]]:
    """The calls of torch's functions, on a machine where the backend is first."""
    with sdpa_standin.sdpa_on_cuda() as calls, fusedops.use(NAME, fallback="raise"):
        yield calls


# --------------------------------------------------------------------------------------------------------------- limits


def explained(dtype: torch.dtype = BF16, capability: tuple[int, int] = (9, 0), **changes: Any) -> Any:
    """Return what explain has of sdpa for a call on a GPU."""
    sizes = {"b": 2, "n": 4, "nk": 4, "sq": 32, "sk": 32, "d": 64, "dv": 64, **changes}
    shapes = [(sizes["n"], sizes["sq"], "d"), (sizes["nk"], sizes["sk"], "d"), (sizes["nk"], sizes["sk"], "dv")]
    specs = [TensorSpec((sizes["b"], n, s, sizes[d]), dtype, "cuda", capability=capability) for n, s, d in shapes]
    mask = TensorSpec(changes["mask"], torch.bool, "cuda", capability=capability) if "mask" in changes else None
    options = {name: changes[name] for name in ("causal", "window", "return_lse") if name in changes}
    with fusedops.use("sdpa,eager"):
        return fusedops.explain(attention, *specs, mask, changes.get("scale"), **options)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ({}, ""),
        ({"capability": (8, 0)}, ""),
        ({"capability": (7, 5)}, "compute capability 7.5 of the device of q, expected at least 8.0 (with q: bfloat16)"),
        ({"capability": (7, 5), "dtype": torch.float16}, ""),
        ({"capability": (5, 0), "dtype": torch.float32}, ""),
        (
            {"capability": (3, 7), "dtype": torch.float32},
            "compute capability 3.7 of the device of q, expected at least",
        ),
        ({"dtype": torch.float64}, "got q of float64, expected float16, bfloat16 or float32"),
        ({"d": 8, "dv": 8}, ""),
        ({"d": 12, "dv": 16}, "got dim 3 of q = 12, expected a multiple of 8 of at least 8 (with q: float16 or"),
        ({"d": 16, "dv": 12}, "got dim 3 of v = 12, expected a multiple of 8 of at least 8 (with v: float16 or"),
        ({"d": 12, "dv": 4, "dtype": torch.float32}, ""),
        ({"d": 10, "dtype": torch.float32}, "got dim 3 of q = 10, expected a multiple of 4 of at least 4 (with q:"),
        ({"d": 512, "dv": 512}, ""),
        ({"d": 64, "dv": 32}, ""),
        ({"nk": 1}, ""),
        ({"b": 65535}, ""),
        ({"b": 65536}, "got dim 0 of q = 65536, expected a size of at most 65535"),
        ({"n": 65536, "nk": 1}, "got dim 1 of q = 65536, expected a size of at most 65535"),
        ({"scale": 0.0}, "got scale = 0.0, expected a Python number of at least 1e-30, finite in float32"),
        ({"scale": -1.0}, "got scale = -1.0, expected a Python number of at least 1e-30, finite in float32"),
        ({"causal": True, "window": (3, 0)}, "got a window, expected no window"),
        ({"causal": "upper_left", "sq": 8}, ""),
        ({"causal": "upper_left", "sq": 64}, ""),
        ({"causal": "lower_right", "sq": 8}, "with 8 queries and 32 keys, expected 'none' or 'upper_left', or Sq =="),
        ({"mask": (2, 1, 1, 32)}, ""),
        ({"mask": (2, 4, 32, 32), "causal": True}, ""),
        ({"sk": 0}, ""),
    ],
    ids=str,
)
def test_its_limits_on_a_gpu(call: dict[str, Any], text: str) -> None:
    decision = explained(**call)
    assert decision.backend == ("eager" if text else "sdpa"), decision
    assert text in str(decision)
    if text:
        (candidate,) = (each for each in decision.candidates if each.backend == "sdpa")
        assert all(reason.fix for reason in candidate.reasons)


def test_the_gradient_of_lse_is_another_backends() -> None:
    assert explained(return_lse=True).backward == "eager"
    assert explained().backward == "sdpa"


def test_flash_attn_is_before_it_and_eager_after() -> None:
    priority = {info.name: info.priority for info in fusedops.backends()}
    assert priority["flash_attn"] > priority["sdpa"] > priority["eager"]
    specs = [TensorSpec((2, 4, 32, 64), BF16, "cuda")] * 3
    assert fusedops.explain(attention, *specs).backend == "flash_attn"
    assert fusedops.explain(attention, *specs, TensorSpec((2, 1, 1, 32), torch.bool, "cuda")).backend == "sdpa"


@pytest.mark.parametrize(
    ("call", "bytes_of"),
    [
        ({"mask": (2, 1, 1, 33), "sk": 33}, {"additive-mask": 2 * 48 * 2}),
        ({"nk": 2}, {}),
        ({"nk": 2, "dtype": torch.float32}, {"grouped-heads": 2 * 2 * 4 * 32 * 64 * 4}),
        ({"nk": 2, "capability": (7, 5), "dtype": torch.float16}, {"grouped-heads": 2 * 2 * 4 * 32 * 64 * 2}),
        ({"nk": 2, "d": 200, "dv": 200}, {"grouped-heads": 2 * 2 * 4 * 32 * 200 * 2}),
        ({"nk": 2, "d": 264, "dv": 264}, {"grouped-heads": 2 * 2 * 4 * 32 * 264 * 2}),
    ],
    ids=str,
)
def test_adaptations_have_their_bytes(call: dict[str, Any], bytes_of: dict[str, int]) -> None:
    text = str(explained(**call))
    for name in ("additive-mask", "grouped-heads"):
        assert (name in text) == (name in bytes_of), text
    for size in bytes_of.values():
        assert f"{size} bytes" in text or f"{size / 1024:.0f} KiB" in text or f"{size:,}" in text, text


# --------------------------------------------------------------------------------------------------------------- values


def test_random_calls(log: list[Call]) -> None:
    taken = served_calls(NAME, 200, (torch.float32, torch.float16, BF16))
    assert taken >= 20, taken
    assert {call.function for call in log} == {*FLASH, *EFFICIENT}


@pytest.mark.parametrize(
    ("dtype", "changes", "functions"),
    [
        (BF16, {}, FLASH),
        (torch.float16, {"causal": True}, FLASH),
        (BF16, {"causal": "upper_left", "sk": 9}, FLASH),
        (BF16, {"causal": "upper_left", "sk": 4}, EFFICIENT),
        (BF16, {"d": 200}, EFFICIENT),
        (BF16, {"d": 256}, FLASH),
        (BF16, {"d": 264}, EFFICIENT),
        (BF16, {"mask": (2, 1, 1, 6)}, EFFICIENT),
        (torch.float32, {}, EFFICIENT),
        (torch.float32, {"causal": "upper_left", "sk": 9}, EFFICIENT),
    ],
    ids=str,
)
def test_which_function_computes(
    dtype: torch.dtype, changes: dict[str, Any], functions: list[str], log: list[Call]
) -> None:
    tensors = qkv(dtype, sk=changes.get("sk", 6), d=changes.get("d", 16))
    mask = torch.rand(changes["mask"]) < 0.3 if "mask" in changes else None
    assert_right("attention", *tensors, mask, causal=changes.get("causal", False))
    assert [call.function for call in log] == functions


def test_before_compute_capability_8_efficient_computes() -> None:
    with sdpa_standin.sdpa_on_cuda(capability=(7, 5)) as log, fusedops.use(NAME, fallback="raise"):
        attention(*qkv(torch.float16))
    assert [call.function for call in log] == ["efficient"]


# ---------------------------------------------------------------------------------------------------------- corrections


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float32, "efficient"), (BF16, "cudnn")], ids=str)
def test_rows_that_see_no_key(dtype: torch.dtype, kernel: str, causal: bool) -> None:
    q, k, v = qkv(dtype)
    mask = torch.zeros(2, 1, 6, 6, dtype=torch.bool)
    mask[0, :, 2], mask[1, :, :, 0] = True, True  # one row; the first key, which is the only one of a causal first row
    dead = mask.all(-1).expand(2, 4, 6).clone()
    dead[1, :, 0] = causal
    choice = {"choice": CUDNN} if kernel == "cudnn" else {}
    with sdpa_standin.sdpa_on_cuda(**choice) as log, fusedops.use(NAME, fallback="raise"):
        out, lse = attention(q, k, v, mask, causal=causal, return_lse=True)
        assert bool((out[dead] == 0).all())
        assert bool((lse[dead] == -math.inf).all())
        assert bool(out.isfinite().all())
        assert bool(lse[~dead].isfinite().all())
        tensors = leaves(q, k, v)
        grad = torch.randn(out.shape).to(dtype)
        out = attention(*tensors, mask, causal=causal)
        clean = torch.autograd.grad(out, tensors, grad, retain_graph=True)
        grad[dead] = math.nan  # reaches no gradient
        for one, other in zip(clean, torch.autograd.grad(out, tensors, grad)):
            assert torch.equal(one, other)
        assert bool((clean[0][dead] == 0).all())
    assert [call.function for call in log][-3:] == [kernel, f"{kernel}_backward", f"{kernel}_backward"]


def test_dead_rows_are_computed_in_the_size_of_the_mask(log: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the expanded mask, B x Nq x Sq x Sk bytes would be written."""
    elements: list[int] = []
    compute = attention_cuda.dead_rows

    def noted(bias: Tensor, queries: int, causal: bool) -> Tensor:
        elements.append(bias.numel())
        return compute(bias, queries, causal)

    monkeypatch.setattr(attention_cuda, "dead_rows", noted)
    attention(*qkv(), torch.zeros(2, 1, 1, 6, dtype=torch.bool))
    assert elements == [2 * 6]


def test_keys_after_the_last_query_are_left_out(log: list[Call]) -> None:
    q, k, v = qkv(sk=9)
    k[:, :, 6:], v[:, :, 6:] = math.nan, math.inf
    tensors = leaves(q, k, v)
    out = attention(*tensors, causal="upper_left")
    gradients = torch.autograd.grad(out.sum(), tensors)
    assert all(bool(each.isfinite().all()) for each in (out, *gradients))
    assert all(bool((each[:, :, 6:] == 0).all()) for each in gradients[1:])
    assert log[0].args[1].shape[2] == 6


def test_a_row_with_nan_is_nan_in_backward_too(log: list[Call]) -> None:
    """The lse of flash is inf there, by which such a row adds nothing to the gradients."""
    q, k, v = qkv()
    q[0, 0, 5] = math.nan
    lse = attention(q, k, v, return_lse=True)[1]
    assert bool(lse[0, 0, 5].isnan())
    assert bool(lse[1].isfinite().all())
    tensors = leaves(q, k, v)
    _, _, dv = torch.autograd.grad(attention(*tensors).sum(), tensors)
    assert bool(dv[0, 0].isnan().all())


@pytest.mark.parametrize(
    "shape", [(6, 9), (9,), (), (2, 1, 1, 9), (2, 4, 6, 1), (2, 1, 6, 9), (4, 1, 9), (1,)], ids=str
)
def test_masks_become_aligned_once_and_are_expanded_without_memory(shape: tuple[int, ...], log: list[Call]) -> None:
    q, k, v = qkv(torch.float32, sk=9)
    mask = torch.rand(shape) < 0.4
    with fusedops.tensor_cache.reuse():
        out = attention(q, k, v, mask)
        assert torch.equal(out, attention(q, k, v, mask))
    one, other = (call.args[3] for call in log)
    torch.testing.assert_close(out, attention(q, k, v, mask, backend="eager"))
    assert one.data_ptr() == other.data_ptr()  # made once
    elements = math.prod(mask.shape[:-1]) * 16
    assert one.untyped_storage().nbytes() == elements * 4


def test_aligned_tensors_are_passed_as_they_are(log: list[Call]) -> None:
    q, k, v = qkv(nk=4)
    for tensors in ((q, k, v), (q.float(), k.float(), v.float())):
        attention(*tensors)
        assert [arg.data_ptr() for arg in log[-1].args[:3]] == [each.data_ptr() for each in tensors]


def test_rocm_has_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import fusedops_sdpa

    assert fusedops_sdpa.fusedops_backend().device_types == ("cpu", "cuda")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    backend = fusedops_sdpa.fusedops_backend()
    assert backend.device_types == ("cpu",)
    assert all(kernel.serves("cpu") for kernel in backend.kernels)


def test_rows_of_an_odd_length_in_memory(log: list[Call]) -> None:
    assert_right("attention", *(torch.cat((t, t[..., :1]), 3)[..., : t.shape[3]] for t in qkv()))
