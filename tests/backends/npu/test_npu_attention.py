"""attention on the stand-in device: what the vendor gets, each limit, masked rows, and random calls."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from ascend import candidate
from right import assert_right
from torch import Tensor

import fusedops
from fusedops import TensorSpec, attention, masks, testing

OP = testing.OPS["attention"]
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FORWARD, BACKWARD = "npu_fusion_attention", "npu_fusion_attention_grad"
OPEN = 2**31 - 1
MIB4 = 2048 * 2048


def heads(b: int, nq: int, nk: int, sq: int, sk: int, d: int = 16, dtype: torch.dtype = F32) -> dict[str, Any]:
    """Return q, k and v of a call, on the CPU."""
    generator = torch.Generator().manual_seed(sq + sk)
    shapes = {"q": (b, nq, sq, d), "k": (b, nk, sk, d), "v": (b, nk, sk, d)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def check(call: dict[str, Any]) -> None:
    """Compare a call on npu, forward and backward, with float64."""
    with fusedops.use("npu", fallback="silent" if call.get("return_lse") else "raise"):  # eager has the gradient of lse
        assert_right("attention", **call, device="npu")


@pytest.mark.parametrize(
    ("lengths", "options", "mode"),
    [
        ((9, 9), {}, (0, OPEN, OPEN)),
        ((9, 9), {"causal": True}, (2, OPEN, OPEN)),
        ((9, 9), {"causal": "lower_right"}, (2, OPEN, OPEN)),
        ((5, 9), {"causal": "upper_left"}, (2, OPEN, OPEN)),
        ((9, 5), {"causal": "upper_left"}, (2, OPEN, OPEN)),
        ((5, 9), {"causal": "lower_right"}, (3, OPEN, OPEN)),
        ((9, 5), {"causal": "lower_right"}, (3, OPEN, OPEN)),  # four rows see no key
        ((1, 9), {"causal": "lower_right"}, (0, OPEN, OPEN)),  # decoding: the query sees every key
        ((1, 9), {"causal": "upper_left"}, (2, OPEN, OPEN)),
        ((9, 9), {"window": (2, 1)}, (4, 2, 1)),
        ((9, 9), {"causal": True, "window": (2, 1)}, (4, 2, 0)),
        ((5, 9), {"causal": "lower_right", "window": (2, 0)}, (4, 2, 0)),
        ((5, 9), {"causal": "upper_left", "window": (2, 0)}, (4, 6, -4)),  # sides from the lower right
        ((9, 5), {"causal": "upper_left", "window": (1, 0)}, (4, -3, 4)),  # three rows see no key
        ((9, 5), {"causal": "lower_right", "window": (1, 0)}, (4, 1, 0)),
        ((5, 9), {"window": (2, 1)}, (4, 2, 1)),  # aligned at the lower right, as the vendor's
        ((9, 5), {"window": (2, 1)}, (4, 2, 1)),  # three rows see no key
        ((9, 9), {"window": (100, 1)}, (4, OPEN, 1)),
        ((9, 9), {"window": (1, 100)}, (4, 1, OPEN)),
        ((9, 9), {"window": (100, 100)}, (0, OPEN, OPEN)),
        ((1, 70), {"causal": "lower_right", "window": (31, 0)}, (4, 31, OPEN)),
    ],
    ids=str,
)
def test_an_alignment_or_a_window_is_a_mode(
    torch_npu: ModuleType, lengths: tuple[int, int], options: dict[str, Any], mode: Any
) -> None:
    """In float32: the kit's calls, on this stand-in, have each dtype."""
    call = {**heads(2, 4, 2, *lengths), **options}
    causal = call.get("causal", "none")
    check({**call, "causal": "upper_left" if causal is True else causal})
    assert [made.name for made in torch_npu.calls] == [FORWARD, BACKWARD]
    for made in torch_npu.calls:
        assert tuple(made.options[name] for name in ("sparse_mode", "pre_tockens", "next_tockens")) == mode
        given = [shape for shape, kind in zip(made.shapes, made.dtypes) if kind == torch.bool]
        assert given == ([(2048, 2048)] if mode[0] else [])


@pytest.mark.parametrize(
    ("shape", "passed", "unchanged"),
    [
        ((2, 4, 5, 9), (2, 4, 5, 9), True),
        ((2, 1, 5, 9), (2, 1, 5, 9), True),
        ((1, 1, 5, 9), (1, 1, 5, 9), True),
        ((5, 9), (1, 1, 5, 9), True),
        ((2, 1, 1, 9), (2, 1, 5, 9), False),
        ((1, 4, 5, 9), (2, 4, 5, 9), False),
        ((4, 1, 9), (2, 4, 5, 9), False),
        ((1, 1, 1, 9), (1, 1, 5, 9), False),
        ((5, 1), (1, 1, 5, 9), False),
        ((9,), (1, 1, 5, 9), False),
        ((), (1, 1, 5, 9), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [torch.bool, torch.uint8], ids=str)
@pytest.mark.parametrize("causal", ["none", "lower_right"])
def test_a_mask_is_expanded_where_the_vendor_does_not_broadcast(
    torch_npu: ModuleType, shape: tuple[int, ...], passed: tuple[int, ...], unchanged: bool, kind: Any, causal: str
) -> None:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    mask = mask if kind == torch.bool else mask.to(kind) * 7  # any number but 0 is masked out
    check({**heads(2, 4, 2, 5, 9), "mask": mask, "causal": causal})
    for made in torch_npu.calls:
        assert made.shapes[-1] == passed
        assert made.dtypes[-1] == torch.bool
        assert made.options["sparse_mode"] == 0
    unchanged = unchanged and kind == torch.bool and causal == "none"
    written = None if unchanged else math.prod(passed)
    for direction in ("forward", "backward"):
        call = {**heads(2, 4, 2, 5, 9), "mask": mask, "causal": causal}
        assert adaptations(call, direction).get("mask") == written


def adaptations(call: dict[str, Any], direction: str = "backward") -> dict[str, int]:
    """Return the bytes of each adaptation of a call on npu, by default of its backward."""
    on_npu = {
        name: TensorSpec(tuple(x.shape), x.dtype, "npu") if isinstance(x, Tensor) else x for name, x in call.items()
    }
    return {each.name: each.bytes for each in candidate(attention, **on_npu).adaptations if each.direction == direction}


@pytest.mark.usefixtures("torch_npu")
def test_what_is_made_is_stated_with_its_bytes() -> None:
    call = heads(2, 4, 2, 5, 9)
    assert adaptations(call) == {"statistics": 2 * 4 * 5 * 64}
    assert adaptations({**call, "causal": "lower_right"}) == {"triangle": MIB4, "statistics": 2 * 4 * 5 * 64}
    assert adaptations({**call, "causal": "lower_right"}, "forward") == {"triangle": MIB4}
    one = heads(2, 4, 2, 1, 9)
    assert adaptations({**one, "causal": "lower_right"}) == {"statistics": 2 * 4 * 64}


def test_the_triangle_is_made_once_and_a_mask_once_in_a_block(torch_npu: ModuleType) -> None:
    from standin import npu_device

    call = {name: x.to("npu") for name, x in heads(1, 2, 2, 6, 6).items()}
    mask = (torch.rand(1, 1, 1, 6) < 0.4).to("npu")
    for options in ({"causal": True}, {"mask": mask}):
        with fusedops.use("npu", fallback="raise"), fusedops.tensor_cache.reuse():
            attention(**call, **options)
            npu_device.reset()
            attention(**call, **options)
        assert not {"triu", "ones", "expand", "copy", "clone", "all"} & set(npu_device.kernels())
    assert npu_device.synchronisations() == 0


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("masked", ["all", "some", "band"])
def test_a_fully_masked_row_is_zero_and_adds_nothing(masked: str) -> None:
    call = {name: x.to("npu").requires_grad_() for name, x in heads(1, 4, 2, 9, 5, dtype=BF16).items()}
    mask = torch.zeros(9, 5, dtype=torch.bool)
    dead = [0, 1, 2, 3] if masked == "band" else [*range(9)] if masked == "all" else [0, 4, 8]
    mask[dead] = True
    options: dict[str, Any] = {"causal": "lower_right"} if masked == "band" else {"mask": mask.to("npu")}
    with fusedops.use("npu", fallback="raise"):
        out = attention(**call, **options)
        with torch.no_grad():
            _, lse = attention(**call, **options, return_lse=True)
        assert bool((out.cpu()[:, :, dead] == 0).all())
        assert bool((lse.cpu()[:, :, dead] == -math.inf).all())
        grad = torch.randn(out.shape).to(BF16)
        one = torch.autograd.grad(out, [*call.values()], grad.to("npu"), retain_graph=True)
        grad[:, :, dead] = math.nan  # garbage in a row that sees nothing reaches no gradient
        other = torch.autograd.grad(out, [*call.values()], grad.to("npu"))
    assert bool((one[0].cpu()[:, :, dead] == 0).all())
    for a, b in zip(one, other):
        assert torch.equal(a.cpu(), b.cpu())
        assert masked != "all" or not a.cpu().any()


def test_releases_that_return_four_gradients(torch_npu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those up to 2.6.0 and 2.7.1 have no gradient of a sink."""
    whole = torch_npu.npu_fusion_attention_grad
    monkeypatch.setattr(torch_npu, BACKWARD, lambda *args, **kwargs: whole(*args, **kwargs)[:4])
    check({**heads(1, 2, 2, 6, 6), "causal": "upper_left"})


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("width", [16, 11, 1, 0])
def test_narrower_values_are_padded(torch_npu: ModuleType, width: int, dtype: torch.dtype) -> None:
    """As in multi-head latent attention, with heads of 192 and values of 128."""
    call = heads(2, 4, 2, 5, 9, dtype=dtype)
    call["v"] = call["v"][..., :width]
    check({**call, "causal": "lower_right"})
    forward, backward = torch_npu.calls
    assert forward.shapes[:3] == ((2, 4, 5, 16), (2, 2, 9, 16), (2, 2, 9, 16))
    assert backward.shapes[3] == (2, 4, 5, 16)
    copies = (2 * 4 * 5 + 2 * 2 * 9) * 16 * dtype.itemsize
    for times, direction in ((1, "forward"), (2, "backward")):
        written = adaptations(call, direction).get("head-size")
        assert written == (None if width == 16 else times * copies)


@pytest.mark.usefixtures("torch_npu")
def test_a_cropped_result_has_memory_of_its_own_size() -> None:
    q, k, v = (x.to("npu").requires_grad_() for x in heads(1, 1, 1, 1, 1).values())
    out = attention(q, k, v[..., :11])
    (gradient,) = torch.autograd.grad(out, v, torch.ones_like(out))
    assert (out.stride(), out.untyped_storage().nbytes()) == ((11, 11, 11, 1), 44)
    assert gradient.stride() == (16, 16, 16, 1)


def test_models_layouts_are_passed_on(torch_npu: ModuleType) -> None:
    call = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in heads(2, 4, 2, 7, 7).items()}
    check({**call, "causal": "upper_left"})
    assert torch_npu.calls[0].shapes[0] == (2, 4, 7, 16)


def reasons(direction: str = "forward", **call: Any) -> str:
    """Return the reasons of a refusal, empty where npu takes the call."""
    return " ".join(map(str, candidate(attention, **call).reasons))


def specs(b: int, nq: int, nk: int, sq: int, sk: int, d: int, dv: int | None = None, dtype: Any = BF16) -> Any:
    of = {"q": (b, nq, sq, d), "k": (b, nk, sk, d), "v": (b, nk, sk, dv or d)}
    return {name: TensorSpec(shape, dtype, "npu") for name, shape in of.items()}


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize(
    ("inside", "outside", "text"),
    [
        ((1, 1, 1, 8, 8, 768), (1, 1, 1, 8, 8, 769), "a size of at most 768"),
        ((1, 256, 256, 8, 8, 64), (1, 257, 257, 8, 8, 64), "a size of at most 256"),
        ((1, 256, 1, 8, 8, 64), (1, 260, 1, 8, 8, 64), "a size of at most 256"),
        ((1, 1, 1, 1_000_000, 8, 8), (1, 1, 1, 1_000_001, 8, 8), "a size of at most 1000000"),
        ((1, 1, 1, 8, 1_000_000, 8), (1, 1, 1, 8, 1_000_001, 8), "dim 2 of k = 1000001"),
        ((2_000_000, 1, 1, 1, 1, 8), (2_000_001, 1, 1, 1, 1, 8), "a size of at most 2000000"),
        ((1, 1, 1, 8, 8, 64, 64), (1, 1, 1, 8, 8, 64, 65), "at most that of k, 64"),
        ((1, 1, 1, 8, 8, 64, None, F16), (1, 1, 1, 8, 8, 64, None, F64), "float64"),
    ],
    ids=str,
)
def test_a_limit(inside: Any, outside: Any, text: str) -> None:
    assert reasons(**specs(*inside)) == ""
    refused = reasons(**specs(*outside))
    assert text in refused, refused
    assert "to fix: " in refused


@pytest.mark.usefixtures("torch_npu")
def test_the_gradient_of_lse_runs_on_eager() -> None:
    q = torch.randn(1, 2, 5, 8).to("npu").requires_grad_()
    decision = fusedops.explain(attention, q, q, q, return_lse=True)
    assert (decision.backend, decision.backward) == ("npu", "eager")
    assert (fusedops.explain(attention, q, q, q).backward) == "npu"


@pytest.mark.usefixtures("torch_npu")
def test_the_modes_are_the_bands() -> None:
    """Every alignment and window of small lengths, against the mask written out."""
    windows = [None, *((left, right) for left in (0, 1, 3) for right in (0, 2))]
    with fusedops.use("npu", fallback="raise"):
        for sq, sk in ((a, b) for a in (1, 2, 5) for b in (1, 2, 5)):
            call = {name: x.to("npu") for name, x in heads(1, 1, 1, sq, sk, 4).items()}
            for causal in ("none", "upper_left", "lower_right"):
                for window in windows:
                    outside = masks.from_band(sq, sk, masks.band(sq, sk, causal, window), "npu")
                    got = attention(**call, causal=causal, window=window, return_lse=True)
                    want = attention(**call, mask=outside, return_lse=True)
                    for one, other in zip(got, want):
                        assert torch.allclose(one.cpu(), other.cpu(), atol=1e-6), (sq, sk, causal, window)
