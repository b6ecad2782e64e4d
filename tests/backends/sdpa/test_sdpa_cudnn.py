"""sdpa on CUDA by cuDNN's kernel: when it is chosen, and its corrections, on a stand-in. No GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sdpa_standin
import torch
from attention_calls import served_calls
from right import assert_right
from sdpa_standin import CUDNN, FLASH, NAME, Call
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fusedops
from fusedops import TensorSpec, attention
from fusedops_sdpa import _cuda_choice, _torch
from fusedops_sdpa._cuda_choice import kernel_of

BF16 = torch.bfloat16
BOTH = ["cudnn", "cudnn_backward"]


def tensors(sq: int = 6, sk: int = 6, nk: int = 2, d: int = 16, dv: int | None = None) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(sq + sk)
    sizes = (4, sq, d), (nk, sk, d), (nk, sk, dv or d)
    return tuple(torch.randn(2, *size, generator=generator).to(BF16) for size in sizes)


@pytest.fixture
def log() -> Iterator[list[Call]]:
    """The calls of torch's functions where scaled_dot_product_attention takes cuDNN."""
    with sdpa_standin.sdpa_on_cuda(choice=CUDNN) as calls, fusedops.use(NAME, fallback="raise"):
        yield calls


def spec(*shape: int, dtype: torch.dtype = BF16, capability: tuple[int, int] = (9, 0)) -> TensorSpec:
    return TensorSpec(shape, dtype, "cuda", capability=capability)


# -------------------------------------------------------------------------------------------------------------- choice


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        ({}, "cudnn"),
        ({"dtype": torch.float16, "causal": "upper_left"}, "cudnn"),
        ({"dtype": torch.float32}, "efficient"),
        ({"capability": (10, 0)}, "cudnn"),
        ({"capability": (8, 0)}, "flash"),
        ({"capability": (12, 0)}, "flash"),
        ({"mask": (2, 1, 1, 2048)}, "cudnn"),
        ({"nk": 2}, "cudnn"),
        ({"d": 128}, "cudnn"),
        ({"d": 136}, "flash"),
        ({"d": 192, "dv": 128}, "cudnn"),
        ({"d": 256}, "cudnn"),
        ({"d": 128, "dv": 192}, "efficient"),
        ({"sq": 128, "sk": 128}, "flash"),  # a plan takes longer than many such calls
        ({"sq": 128, "sk": 128, "mask": (2, 1, 1, 128)}, "efficient"),
        ({"sq": 1, "sk": 2**22}, "flash"),
        ({"sq": 2**22, "sk": 1}, "flash"),
        ({"sq": 2048, "sk": 1024, "causal": "upper_left"}, "cudnn"),
    ],
    ids=str,
)
def test_what_computes_a_call(call: dict[str, Any], kernel: str) -> None:
    sizes = {"sq": 2048, "sk": 2048, "n": 16, "nk": 16, "d": 64, **call}
    options = {"dtype": call.get("dtype", BF16), "capability": call.get("capability", (9, 0))}
    q, k = (
        spec(2, sizes["n"], sizes["sq"], sizes["d"], **options),
        spec(2, sizes["nk"], sizes["sk"], sizes["d"], **options),
    )
    v = spec(2, sizes["nk"], sizes["sk"], sizes.get("dv", sizes["d"]), **options)
    mask = call.get("mask") and TensorSpec(call["mask"], torch.bool, "cuda")
    for backward in (False, True):
        assert kernel_of(q, k, v, mask, call.get("causal", "none"), backward) == kernel


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        ({}, "flash"),
        ({"causal": "upper_left"}, "cudnn"),  # hides the keys after the last
        ({"causal": "upper_left", "sq": 4096}, "efficient"),  # the last queries see them
        ({"causal": "upper_left", "mask": (2, 1, 1, 2112)}, "efficient"),
        ({"mask": (2, 1, 1, 2112)}, "efficient"),
        ({"capability": (10, 0)}, "cudnn"),
        ({"sk": 2176}, "cudnn"),
        ({"sk": 2111}, "cudnn"),
    ],
    ids=str,
)
def test_a_backward_whose_last_keys_are_not_masked_is_anothers(call: dict[str, Any], kernel: str) -> None:
    options: dict[str, Any] = {"capability": call.get("capability", (9, 0))}
    k = spec(2, 16, call.get("sk", 2112), 64, **options)
    q = spec(2, 16, call.get("sq", 2112), 64, **options)
    mask = call.get("mask") and TensorSpec(call["mask"], torch.bool, "cuda")
    assert kernel_of(q, k, k, mask, call.get("causal", "none"), True) == kernel
    assert kernel_of(q, k, k, mask, call.get("causal", "none"), False) == "cudnn"


def test_torchs_choice_is_kept_in_each_call(log: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    attention(q, k, v)
    monkeypatch.setattr(_torch, "sdp_choice", lambda *args, **options: FLASH.value)  # pyright: ignore[reportUnknownLambdaType]
    attention(q, k, v)

    def none(*args: Any, **options: Any) -> int:
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(_torch, "sdp_choice", none)
    attention(q, k, v)
    monkeypatch.setattr(_torch, "sdp_choice", None)  # a torch without it
    attention(q, k, v)
    assert [call.function for call in log] == ["cudnn", "flash", "flash", "flash"]


def test_not_where_it_is_switched_off_or_results_must_repeat(log: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    monkeypatch.setattr(_torch, "cudnn_is_enabled", lambda: False)
    attention(q, k, v)
    monkeypatch.setattr(_torch, "cudnn_is_enabled", lambda: True)
    for warn_only in (False, True):
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        try:
            attention(q, k, v)
        finally:
            torch.use_deterministic_algorithms(False)
    attention(q, k, v)
    assert [call.function for call in log] == ["flash", "flash", "flash", "cudnn"]


def test_small_calls_ask_nothing(log: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda_choice, "LEAST_WORK", 2**31)
    monkeypatch.setattr(_torch, "sdp_choice", None)
    attention(*tensors())
    assert [call.function for call in log] == ["flash"]


# -------------------------------------------------------------------------------------------------------------- values


def test_random_calls(log: list[Call]) -> None:
    taken = served_calls(NAME, 200, (torch.float16, BF16))
    assert taken >= 20, taken
    assert {call.function for call in log} >= {*BOTH}


@pytest.mark.parametrize(
    ("changes", "functions"),
    [
        ({}, BOTH),
        ({"causal": True}, BOTH),
        ({"causal": "upper_left", "sk": 9}, BOTH),
        ({"causal": "upper_left", "sk": 4}, BOTH),
        ({"mask": (2, 1, 1, 6)}, BOTH),
        ({"mask": (4, 6, 6), "causal": True}, BOTH),
        ({"d": 64, "dv": 32}, BOTH),
        ({"d": 32, "dv": 64}, BOTH),
        ({"d": 192, "dv": 128}, BOTH),
        ({"sq": 1}, ["flash", "flash_backward"]),
        ({"sk": 1}, ["flash", "flash_backward"]),
        ({"sk": 64}, ["cudnn", "flash_backward"]),
        ({"sk": 64, "mask": (64,)}, ["cudnn", "efficient_backward"]),
    ],
    ids=str,
)
def test_which_function_computes(changes: dict[str, Any], functions: list[str], log: list[Call]) -> None:
    sizes = {name: size for name, size in changes.items() if name in ("sq", "sk", "d", "dv")}
    mask = torch.rand(changes["mask"]) < 0.3 if "mask" in changes else None
    assert_right("attention", *tensors(**sizes), mask, causal=changes.get("causal", False))
    assert [call.function for call in log] == functions


# ---------------------------------------------------------------------------------------------------------- the layout


def test_out_is_in_the_order_of_q_without_a_copy(log: list[Call]) -> None:
    q, k, v = tensors()
    assert attention(q, k, v).is_contiguous()
    out, lse = attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, return_lse=True)
    assert out.transpose(1, 2).is_contiguous()
    assert (lse.shape, lse.is_contiguous()) == ((2, 4, 6), True)


def test_every_layout_of_the_gradient_gets_the_plan_of_forwards(log: list[Call]) -> None:
    """The plan of a backward is kept by q, k and v alone: with other strides of grad it reads other memory."""
    leaves = [each.requires_grad_() for each in tensors()]
    out = attention(*leaves)
    grad = torch.randn(out.shape).to(BF16)
    want = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    room = torch.zeros(2, 4, 6, 32, dtype=BF16)
    shifted = torch.zeros(grad.numel() + 1, dtype=BF16)[1:].view(grad.shape)
    for other in (grad.transpose(1, 2).contiguous().transpose(1, 2), room[..., :16], grad.mT.contiguous().mT, shifted):
        given = other.copy_(grad)
        for one, two in zip(want, torch.autograd.grad(out, leaves, given, retain_graph=True)):
            assert torch.equal(one, two)
    torch.autograd.grad(out.sum(), leaves)  # an expanded gradient


def strides(function: Any, args: list[Any]) -> list[tuple[int, ...]]:
    """Return the strides of what a registered op returns, which fake tensors have too."""
    results = function(*args)
    with FakeTensorMode() as mode:
        fakes = function(*[mode.from_tensor(each) if isinstance(each, Tensor) else each for each in args])
    found = [each.stride() for each in results]
    assert [each.stride() for each in fakes] == found
    return found


@pytest.mark.parametrize("order", ["BNSD", "BSND", "SBND"])
@pytest.mark.parametrize("choice", [CUDNN, FLASH], ids=str)
def test_compiled_code_has_the_strides_of_the_kernels(order: str, choice: Any) -> None:
    dims = ["BNSD".index(dim) for dim in order]
    back = [order.index(dim) for dim in "BNSD"]
    q, k, v = (each.permute(dims).contiguous().permute(back) for each in tensors())
    grad = torch.randn(2, 4, 6, 16).to(BF16)
    ops, rest = torch.ops.fusedops, [None, "none", None, False]
    with sdpa_standin.sdpa_on_cuda(choice=choice), fusedops.use(NAME, fallback="raise"):
        assert strides(ops.attention.default, [q, k, v, None, *rest])[0] == q.stride()
        out, lse = ops.attention(q, k, v, None, *rest)
        args = [grad, lse, q, k, v, None, out, lse, *rest, [True] * 3]
        assert strides(ops.attention_backward.default, args) == [each.stride() for each in (q, k, v)]


def test_compiled_code_with_narrower_and_wider_values(log: list[Call]) -> None:
    for width in (8, 32):
        q, k, v = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in tensors(dv=width))
        strides(torch.ops.fusedops.attention.default, [q, k, v])
