"""attention by cuDNN's kernel, where torch takes it: ``make gpu``. Each new size costs cuDNN 0.4 s a direction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_calls import CUDA, DEVICE, HERE
from right import assert_right
from torch import Tensor

import fusedops

if not (HERE and CUDA):
    pytest.skip("needs a GPU: `make gpu` runs these", allow_module_level=True)

from fusedops_sdpa import _cuda_choice, attention_cuda

BF16 = torch.bfloat16


def tensors(sq: int = 136, sk: int = 136, n: int = 4, nk: int = 2, d: int = 64, dv: int = 64) -> tuple[Tensor, ...]:
    """Return q, k and v on the CPU, with the layout of models: (B, S, N, D) in memory."""
    sizes = (n, sq, d), (nk, sk, d), (nk, sk, dv)
    return tuple(torch.randn(2, s, heads, size).to(BF16).transpose(1, 2) for heads, s, size in sizes)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that have run, where no call is too small for cuDNN. Skips where torch takes another kernel."""
    q = torch.zeros(2, 4, 136, 64, dtype=BF16, device=DEVICE)
    monkeypatch.setattr(_cuda_choice, "LEAST_WORK", 0)
    if _cuda_choice.kernel_of(q, q, q, None, "none", backward=True) != "cudnn":
        pytest.skip("torch takes another kernel here")
    names: list[str] = []
    for name in ("_CUDNN", "_CUDNN_BACKWARD", "_FLASH", "_FLASH_BACKWARD", "_EFFICIENT", "_EFFICIENT_BACKWARD"):
        own = getattr(attention_cuda, name)

        def noted(*args: Any, own: Any = own, name: str = name, **options: Any) -> Any:
            names.append(name)
            return own(*args, **options)

        monkeypatch.setattr(attention_cuda, name, noted)
    return names


def dead_rows() -> Tensor:
    mask = torch.rand(2, 1, 136, 136) < 0.3
    mask[0, :, 3], mask[1, :, :, 0] = True, True
    return mask


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("causal", {"nk": 4}, {"causal": True}),
    ("groups", {}, {}),
    ("more keys", {"sq": 96, "sk": 300, "d": 128, "dv": 128}, {"causal": "upper_left"}),
    ("fewer keys", {"sq": 300, "sk": 104}, {"causal": "upper_left"}),
    ("a mask with rows that see no key", {}, {"mask": dead_rows()}),
    ("the same with causal", {}, {"mask": dead_rows(), "causal": True}),
    ("narrower values, an odd length", {"sk": 77, "dv": 32}, {"mask": torch.rand(136, 77) < 0.3}),
]


@pytest.mark.parametrize(("sizes", "options"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_values(sizes: dict[str, Any], options: dict[str, Any], log: list[str]) -> None:
    given = dict(options)
    with fusedops.use("sdpa,eager", fallback="silent"):  # eager has the gradient of lse
        assert_right("attention", *tensors(**sizes), given.pop("mask", None), device=DEVICE, **given)
    assert log == ["_CUDNN", "_CUDNN_BACKWARD"]


def test_layouts_of_the_gradient(log: list[str]) -> None:
    """The plan of a backward has the strides of the first gradient."""
    leaves = [each.to(DEVICE).requires_grad_() for each in tensors(sq=144, sk=144)]
    with fusedops.use("sdpa", fallback="raise"):
        out = fusedops.attention(*leaves, causal=True)
    grad = torch.randn_like(out)
    room = torch.zeros(*out.shape[:3], 128, dtype=BF16, device=DEVICE)
    want = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    for other in (grad.contiguous(), room[..., :64].copy_(grad), grad.mT.contiguous().mT):
        for one, two in zip(want, torch.autograd.grad(out, leaves, other, retain_graph=True)):
            torch.testing.assert_close(one, two, atol=2e-2, rtol=2e-2)


def test_lse_far_below_zero(log: list[str]) -> None:
    """The keys after the last of 192 are not masked in cuDNN's backward: another kernel computes it."""
    q, k, v = (each.to(DEVICE) * 0.1 for each in tensors(sq=192, sk=192))
    q[..., 0], k[..., 0] = 1.0, -960.0
    leaves = [each.requires_grad_() for each in (q, k, v)]
    with fusedops.use("sdpa", fallback="raise"):
        gradients = torch.autograd.grad(fusedops.attention(*leaves).sum(), leaves)
    assert all(bool(each.isfinite().all()) for each in gradients)
    assert log == ["_CUDNN", "_FLASH_BACKWARD"]


def test_a_row_with_nan(log: list[str]) -> None:
    q, k, v = (each.to(DEVICE) for each in tensors(nk=4))
    q[0, 0, 5] = torch.nan
    leaves = [each.requires_grad_() for each in (q, k, v)]
    with fusedops.use("sdpa,eager", fallback="silent"):
        out, lse = fusedops.attention(*leaves, causal=True, return_lse=True)
        assert bool(out[0, 0, 5].isnan().all())
        assert bool(lse[0, 0, 5].isnan())
        assert bool(lse[1].isfinite().all())
        _, dk, dv = torch.autograd.grad(fusedops.attention(*leaves, causal=True).sum(), leaves)
    for each in (dk, dv):
        assert bool(each[0, 0, :6].isnan().all())
        assert bool(each[1].isfinite().all())
