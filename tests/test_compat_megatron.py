"""The drop-in for Megatron and apex, beside megatron-core itself; where they differ, it is as the docs say."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import megatron_peer
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import fusedops
from fusedops.compat import megatron as ours
from fusedops.errors import InvalidInputError

B, NP, SQ, SK = 2, 3, 8, 8
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own


@pytest.fixture
def peer() -> Any:
    return megatron_peer.modules()


def flags(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype == torch.float16, dtype == torch.bfloat16


def tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 2.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def masked(*shape: int) -> Tensor:
    """A mask with no fully masked row, and the diagonal free, so that a causal mask makes none either."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    if shape[-2] == 1:
        mask[..., 0] = False
    else:
        mask &= ~torch.eye(shape[-2], shape[-1], dtype=torch.bool)
    return mask


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor | None) -> list[Tensor | None]:
    """The output, and the gradient of each input."""
    leaves = [t if t is None else t.detach().clone().requires_grad_() for t in inputs]
    y = function(*leaves)
    grad = tensor(*y.shape, dtype=y.dtype, seed=9)
    found = iter(torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], grad))
    return [y.detach(), *(None if leaf is None else next(found) for leaf in leaves)]


def assert_same(
    got: Sequence[Tensor | None], want: Sequence[Tensor | None], dtype: torch.dtype, *, roundings: int = 4
) -> None:
    """Equal in shape and dtype, and within some roundings in ``dtype``: Megatron rounds after each step."""
    # Megatron writes sqrt(2 / pi) with 8 digits, which float64 can tell
    tolerance = max(roundings * {torch.float32: 1e-6}.get(dtype, torch.finfo(dtype).eps), 3e-8)
    assert_close(list(got), list(want), atol=tolerance, rtol=tolerance)


# --------------------------------------------------------------------------------------------- names and parameters


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("softmax", "FusedScaleMaskSoftmax"),
        ("softmax", "FusedScaleMaskSoftmax.forward"),
        ("softmax", "FusedScaleMaskSoftmax.is_kernel_available"),
        ("softmax", "FusedScaleMaskSoftmax.forward_fused_softmax"),
        ("softmax", "FusedScaleMaskSoftmax.forward_torch_softmax"),
        ("softmax", "FusedScaleMaskSoftmax.get_batch_per_block"),
        ("softmax", "SoftmaxOne"),
        ("softmax", "SoftmaxOne.forward"),
        *(
            ("softmax", f"{name}.{method}")
            for name in ("ScaledMaskedSoftmax", "ScaledUpperTriangMaskedSoftmax", "ScaledSoftmax")
            for method in ("forward", "backward")
        ),
        ("layers", "attention_mask_func"),
        ("layers", "get_default_causal_mask"),
        ("layers", "get_sliding_window_causal_mask"),
        ("gelu", "bias_gelu"),
        ("gelu", "bias_gelu_back"),
        ("gelu", "GeLUFunction.forward"),
        ("gelu", "GeLUFunction.backward"),
        ("gelu", "bias_gelu_impl"),
        ("dropout", "_bias_dropout_add_func"),
        ("dropout", "bias_dropout_add_unfused"),
        ("dropout", "bias_dropout_add_fused_train"),
        ("dropout", "bias_dropout_add_fused_inference"),
        ("dropout", "get_bias_dropout_add"),
        ("utils", "make_viewless_tensor"),
        ("utils", "assert_viewless_tensor"),
        ("utils", "safely_set_viewless_tensor_data"),
        ("utils", "MakeViewlessTensor.forward"),
        ("utils", "MakeViewlessTensor.backward"),
    ],
)
def test_parameters_are_the_originals(peer: Any, module: str, name: str) -> None:
    """Ours begin with the original's, in its order and with its defaults; what ours have more of is optional."""
    want, got = getattr(peer, module), ours
    for part in name.split("."):
        want, got = getattr(want, part), getattr(got, part)
    wanted = list(inspect.signature(want).parameters.values())
    found = list(inspect.signature(got).parameters.values())
    assert [(p.name, p.default, p.kind) for p in found[: len(wanted)]] == [(p.name, p.default, p.kind) for p in wanted]
    assert all(p.default is not p.empty for p in found[len(wanted) :])


def test_classes_are_of_the_originals_kind(peer: Any) -> None:
    for name in ("ScaledMaskedSoftmax", "ScaledUpperTriangMaskedSoftmax", "ScaledSoftmax"):
        assert issubclass(getattr(ours, name), torch.autograd.Function)
        assert issubclass(getattr(peer.softmax, name), torch.autograd.Function)
    assert issubclass(ours.GeLUFunction, torch.autograd.Function)
    assert issubclass(ours.MakeViewlessTensor, torch.autograd.Function)
    assert {m.name: m.value for m in ours.AttnMaskType} == {m.name: m.value for m in peer.enums.AttnMaskType}


# -------------------------------------------------------------------------------------------- FusedScaleMaskSoftmax


def modules(
    peer: Any, dtype: torch.dtype, kind: str, scale: float | None, window: tuple[int, int] | None = None
) -> tuple[Any, Any]:
    """Ours and Megatron's, alike."""
    last = (peer.layers.attention_mask_func, scale is not None or dtype != torch.float32, scale, window)
    return (
        ours.FusedScaleMaskSoftmax(*flags(dtype), peer.enums.AttnMaskType[kind], True, *last),
        # without fusion: with it, it would import Megatron's CUDA extension
        peer.softmax.FusedScaleMaskSoftmax(*flags(dtype), peer.enums.AttnMaskType[kind], False, *last),
    )


MASKS = {
    "none": None,
    "full": masked(B, 1, SQ, SK),
    "one": masked(1, 1, SQ, SK),
    "per_head": masked(B, NP, SQ, SK),
    "padding": masked(B, 1, 1, SK),
    "2d": masked(SQ, SK),
}


@pytest.mark.parametrize("scale", [None, 0.3, 1 / math.sqrt(72)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_as_megatron(peer: Any, dtype: torch.dtype, mask: str, scale: float | None) -> None:
    mine, theirs = modules(peer, dtype, "padding", scale)
    x = tensor(B, NP, SQ, SK, dtype=dtype)
    got = with_gradients(lambda x: mine(x, MASKS[mask]), x)
    # Megatron masks in place: a leaf in float32 without a scale would be an error
    want = with_gradients(lambda x: theirs(x * 1, MASKS[mask]), x)
    assert_same(got, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sq", [1, SQ])
def test_causal_softmax_as_megatron(peer: Any, dtype: torch.dtype, sq: int) -> None:
    mine, theirs = modules(peer, dtype, "causal", 0.3)
    x = tensor(B, NP, sq, SK, dtype=dtype)  # one query and many keys: a decoder's step, where nothing is masked
    with megatron_peer.on_cpu():
        want = with_gradients(lambda x: theirs(x, None), x)
    assert_same(with_gradients(lambda x: mine(x, None), x), want, dtype)


def test_causal_softmax_of_a_mask_that_is_causal(peer: Any) -> None:
    mine, theirs = modules(peer, torch.float32, "causal", 0.3)
    x, mask = tensor(B, NP, SQ, SK), masked(B, 1, SQ, SK) | ours.get_default_causal_mask(SQ, "cpu")
    assert_same([mine(x, mask)], [theirs(x, mask)], torch.float32)


def test_causal_softmax_of_other_lengths_takes_the_mask_alone(peer: Any) -> None:
    mine, theirs = modules(peer, torch.float32, "causal", 0.3)
    x, mask = tensor(B, NP, 3, SK), masked(B, 1, 3, SK)
    assert_same([mine(x, mask)], [theirs(x, mask)], torch.float32)
    for module in (mine, theirs):
        with pytest.raises(AssertionError, match="causal mask is only for self attention"):
            module(x, None)


@pytest.mark.parametrize("window", [(2, 0), (0, 0), (3, 2), (100, 100)])
@pytest.mark.parametrize(("sq", "sk"), [(8, 8), (3, 8), (1, 8)])
@pytest.mark.parametrize("kind", ["causal", "padding"])
def test_window_as_megatron(peer: Any, window: tuple[int, int], sq: int, sk: int, kind: str) -> None:
    mine, theirs = modules(peer, torch.float32, kind, 0.3, window)
    x = tensor(B, NP, sq, sk)
    with megatron_peer.on_cpu():
        want = with_gradients(lambda x: theirs(x, None), x)
        mask = peer.layers.get_sliding_window_causal_mask(sq, sk, window)
    assert torch.equal(ours.get_sliding_window_causal_mask(sq, sk, window, "cpu"), mask)
    assert_same(with_gradients(lambda x: mine(x, None), x), want, torch.float32)


@pytest.mark.parametrize("mask", ["none", "full", "padding"])
@pytest.mark.parametrize("kind", ["causal", "padding"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_offset_as_megatron(peer: Any, dtype: torch.dtype, kind: str, mask: str) -> None:
    mine, theirs = modules(peer, dtype, kind, 0.3)
    x, offset, given = tensor(B, NP, SQ, SK, dtype=dtype), tensor(NP, seed=3), MASKS[mask]
    if kind == "causal" and given is not None:
        given = given | ours.get_default_causal_mask(SQ, "cpu")  # alone, Megatron would forget that it is causal
    with megatron_peer.on_cpu():
        want = with_gradients(lambda x, offset: theirs(x, given, offset), x, offset)
    assert_same(with_gradients(lambda x, offset: mine(x, given, offset), x, offset), want, dtype)


@pytest.mark.parametrize("backend", ["fused", "torch"])
def test_the_named_ways_of_forward(peer: Any, backend: str) -> None:
    mine, theirs = modules(peer, torch.float16, "padding", 0.3)
    x, mask = tensor(B, NP, SQ, SK, dtype=torch.float16), masked(B, 1, SQ, SK)
    got = getattr(mine, f"forward_{backend}_softmax")(x, mask)
    assert_same([got], [theirs.forward_torch_softmax(x, mask)], torch.float16)


@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize("flagged", DTYPES)
@pytest.mark.parametrize("in_fp32", [True, False])
def test_output_dtype_as_megatron(peer: Any, given: torch.dtype, flagged: torch.dtype, in_fp32: bool) -> None:
    x, mask = tensor(B, NP, SQ, SK, dtype=given), masked(B, 1, SQ, SK)
    args = (*flags(flagged), "padding", False, peer.layers.attention_mask_func, in_fp32, None)
    want = peer.softmax.FusedScaleMaskSoftmax(*args)(x.clone(), mask)
    assert_same([ours.FusedScaleMaskSoftmax(*args)(x, mask)], [want], torch.bfloat16)


@pytest.mark.parametrize("fill", [-1e4, -math.inf, -50.0])
@pytest.mark.parametrize("fusion", [True, False])
def test_another_mask_function_is_called(peer: Any, fusion: bool, fill: float) -> None:
    def mask_func(scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill_(mask, fill)  # writes its argument, which must not be the user's

    x, mask = tensor(B, NP, SQ, SK), masked(B, 1, SQ, SK)
    before = x.clone()
    args = (False, False, ours.AttnMaskType.padding)
    got = ours.FusedScaleMaskSoftmax(*args, fusion, mask_func, True, None)(x, mask)
    assert torch.equal(x, before)
    want = peer.softmax.FusedScaleMaskSoftmax(*args, False, mask_func, True, None)(x.clone(), mask)
    assert_same([got], [want], torch.float32)


def test_an_additive_mask_by_a_function_of_its_own(peer: Any) -> None:
    x, bias = tensor(B, NP, SQ, SK, dtype=torch.float16), tensor(1, NP, SQ, SK, seed=4)
    args = (True, False, ours.AttnMaskType.padding, False, torch.add, True, 0.3)
    want = peer.softmax.FusedScaleMaskSoftmax(*args)(x, bias)
    assert_same([ours.FusedScaleMaskSoftmax(*args)(x, bias)], [want], torch.float16)


def test_errors_as_megatron(peer: Any) -> None:
    for library in (ours, peer.softmax):
        with pytest.raises(AssertionError, match="both"):
            library.FusedScaleMaskSoftmax(True, True, ours.AttnMaskType.padding, True, None, True, None)
        with pytest.raises(AssertionError, match="scale"):
            library.FusedScaleMaskSoftmax(True, False, ours.AttnMaskType.padding, True, None, False, 0.5)
        with pytest.raises(AssertionError):
            library.FusedScaleMaskSoftmax(True, False, ours.AttnMaskType.padding, True, None, True, 0.5)(
                torch.zeros(3, 4, 4, dtype=torch.float16), None
            )


def test_errors_of_ours() -> None:
    with pytest.raises(InvalidInputError, match="attn_mask_type is 'casual'; needs one of padding, causal"):
        ours.FusedScaleMaskSoftmax(False, False, "casual", True, None, True, None)
    module = ours.FusedScaleMaskSoftmax(False, False, "padding", True, None, True, None, (2, 0))
    for offset in (None, torch.zeros(NP)):
        with pytest.raises(InvalidInputError, match=r"mask is torch\.float32; needs bool or uint8"):
            module(tensor(B, NP, SQ, SK), tensor(SQ, SK), offset)


@pytest.mark.parametrize("kind", ["causal", "padding"])
def test_the_type_of_mask_is_told_by_its_name(peer: Any, kind: str) -> None:
    x = tensor(B, NP, SQ, SK)
    want = fusedops.scaled_masked_softmax(x, None, 0.5, causal=kind == "causal")
    for given in (kind, ours.AttnMaskType[kind], peer.enums.AttnMaskType[kind]):
        assert torch.equal(ours.FusedScaleMaskSoftmax(False, False, given, True, None, True, 0.5)(x, None), want)


def test_what_it_says_of_itself() -> None:
    module = ours.FusedScaleMaskSoftmax(False, False, ours.AttnMaskType.causal, True, None, True, 0.5, (2, 0))
    assert repr(module) == ("FusedScaleMaskSoftmax(attn_mask_type=causal, scale=0.5, fusion=True, window_size=(2, 0))")
    assert not module.state_dict()


def test_without_fusion_it_is_the_eager_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    real = fusedops.ops.scaled_masked_softmax

    def spy(*args: Any, backend: str | None = None, **kwargs: Any) -> Tensor:
        seen.append(backend)
        return real(*args, backend=backend, **kwargs)

    monkeypatch.setattr(fusedops.ops, "scaled_masked_softmax", spy)
    for fusion, offset in itertools.product((True, False), (None, torch.zeros(NP))):
        module = ours.FusedScaleMaskSoftmax(False, False, "padding", fusion, None, True, None)
        assert module.is_kernel_available(None, B, NP, SQ, SK) is fusion
        module(tensor(B, NP, SQ, SK), None, offset)
    assert seen == [None, None, "eager", "eager"]


@pytest.mark.parametrize(("sk", "rows"), [(1, 256), (20, 8), (32, 8), (33, 8), (128, 8), (129, 4), (4096, 4)])
def test_rows_of_a_block(sk: int, rows: int) -> None:
    """As apex's csrc/megatron/scaled_masked_softmax.h counts them."""
    assert ours.FusedScaleMaskSoftmax.get_batch_per_block(8, sk, 1, 1) == rows


# ------------------------------------------------------------------------------------------------ meant to differ


def test_a_fully_masked_row_is_zero_and_not_uniform(peer: Any) -> None:
    mine, theirs = modules(peer, torch.float32, "padding", 0.3)
    x, mask = tensor(B, NP, SQ, SK), masked(B, 1, SQ, SK)
    mask[:, :, 2] = True
    y, gradient = with_gradients(lambda x: mine(x, mask), x)
    assert y is not None
    assert gradient is not None
    assert not y[:, :, 2].any()
    assert not gradient[:, :, 2].any()
    assert_close(theirs(x.clone(), mask)[:, :, 2], torch.full((B, NP, SK), 1 / SK))


def test_scores_below_the_fill_value_do_not_lose_to_masked_ones(peer: Any) -> None:
    mine, theirs = modules(peer, torch.float32, "padding", 1.0)
    x = torch.full((1, 1, 1, 4), -10020.0)
    mask = torch.tensor([False, False, True, True])
    assert mine(x, mask).flatten().tolist() == [0.5, 0.5, 0, 0]
    assert theirs(x.clone(), mask).flatten().tolist()[0] < 1e-6


def test_a_mask_is_never_dropped(peer: Any) -> None:
    x, mask, upper = tensor(B, NP, SQ, SK), masked(B, 1, SQ, SK), ours.get_default_causal_mask(SQ, "cpu")
    mine, theirs = modules(peer, torch.float32, "causal", 0.3)
    want = fusedops.scaled_masked_softmax(x, mask | upper, 0.3)
    assert_close(mine(x, mask), want)
    assert (theirs(x, mask)[:, :, 0, 1:] > 0).any()  # Megatron's torch path forgets that it is causal
    mine, theirs = modules(peer, torch.float32, "padding", 0.3, (2, 0))
    window = ours.get_sliding_window_causal_mask(SQ, SK, (2, 0), "cpu")
    assert_close(mine(x, mask), fusedops.scaled_masked_softmax(x, mask | window, 0.3))
    with megatron_peer.on_cpu():
        assert (theirs(x, mask)[mask.expand_as(x)] > 0).any()  # and with a window drops the mask


def test_a_window_of_minus_one_sees_all(peer: Any) -> None:
    x = tensor(B, NP, SQ, SK)
    mine, theirs = modules(peer, torch.float32, "causal", 0.3, (-1, 0))
    assert_close(mine(x, None), fusedops.scaled_masked_softmax(x, None, 0.3, causal=True))
    with megatron_peer.on_cpu():
        assert_close(theirs(x, None), torch.full_like(x, 1 / SK))  # all is masked there
    everywhere = ours.get_sliding_window_causal_mask(SQ, SK, (-1, -1), "cpu")
    assert not everywhere.any()


def test_no_input_is_written(peer: Any) -> None:
    mine, theirs = modules(peer, torch.float32, "padding", None)
    x, mask = tensor(B, NP, SQ, SK), masked(B, 1, SQ, SK)
    before = x.clone()
    mine(x, mask)
    assert torch.equal(x, before)
    theirs(x, mask)
    assert not torch.equal(x, before)  # Megatron's mask function fills it in place


def test_limits_of_the_original_are_gone(peer: Any) -> None:
    mine, _ = modules(peer, torch.float32, "padding", 0.3)
    for shape in ((1, 1, 5, 7), (1, 3, 1, 1), (2, 1, 0, 4), (1, 1, 2, 5000)):
        x = tensor(*shape)
        assert mine.is_kernel_available(None, *shape)
        assert_close(mine(x, None), torch.softmax(x * 0.3, -1))


# ------------------------------------------------------------------------------------------ SoftmaxOne and the masks


@pytest.mark.parametrize("dim", [None, -1])
def test_softmax_one_as_megatron(peer: Any, dim: int | None) -> None:
    x, offset = tensor(B, NP, SQ, 5), tensor(NP, seed=3)
    want = with_gradients(lambda x, offset: peer.softmax.SoftmaxOne(dim, offset)(x), x, offset)
    assert_same(with_gradients(lambda x, offset: ours.SoftmaxOne(dim, offset)(x), x, offset), want, torch.float32)
    exp = x.double().exp()
    assert_close(ours.SoftmaxOne(-1, torch.zeros(1))(x).double(), exp / (1 + exp.sum(-1, keepdim=True)))


def test_softmax_one_refuses_what_the_original_misunderstands(peer: Any) -> None:
    x = tensor(B, NP, SQ, SK)
    with pytest.raises(AttributeError):
        peer.softmax.SoftmaxOne()(x)
    with pytest.raises(InvalidInputError, match=r"denominator_offset is 1\.0; needs a tensor of logits"):
        ours.SoftmaxOne()(x)
    with pytest.raises(InvalidInputError, match="dim is 1; needs -1"):
        ours.SoftmaxOne(1, torch.zeros(NP))


def test_a_fully_masked_row_with_a_sink_is_zero() -> None:
    module = ours.FusedScaleMaskSoftmax(False, False, "padding", True, None, True, None)
    y = module(tensor(B, NP, SQ, SK), torch.ones(SQ, SK, dtype=torch.uint8), torch.zeros(NP))
    assert not y.any()


def test_masks_as_megatron(peer: Any) -> None:
    with megatron_peer.on_cpu():
        want = peer.layers.get_default_causal_mask(5)
    assert torch.equal(ours.get_default_causal_mask(5, "cpu"), want)
    assert ours.get_default_causal_mask(5, device="meta").device.type == "meta"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert ours.get_default_causal_mask(2).device.type == ("cpu" if accelerator is None else accelerator.type)
    for function in (ours.attention_mask_func, peer.layers.attention_mask_func):
        scores = torch.zeros(5, 5)
        assert function(scores, want) is scores  # in place, and callers may count on it
        assert torch.equal(scores, torch.where(want, -10000.0, 0.0))


# ------------------------------------------------------------------------------------------- the softmax Functions

FUNCTIONS: dict[str, tuple[Any, Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "ScaledMaskedSoftmax": (
        ours.ScaledMaskedSoftmax,
        lambda x, mask: ours.ScaledMaskedSoftmax.apply(x, mask, 0.3),
        lambda x, mask: fusedops.scaled_masked_softmax(x, mask, 0.3),
    ),
    "GenericScaledMaskedSoftmax": (
        ours.GenericScaledMaskedSoftmax,
        lambda x, mask: ours.GenericScaledMaskedSoftmax.apply(x, mask, 0.3),
        lambda x, mask: fusedops.scaled_masked_softmax(x, mask, 0.3),
    ),
    "ScaledUpperTriangMaskedSoftmax": (
        ours.ScaledUpperTriangMaskedSoftmax,
        lambda x, mask: ours.ScaledUpperTriangMaskedSoftmax.apply(x.view(-1, SQ, SK), 0.3).view_as(x),
        lambda x, mask: fusedops.scaled_masked_softmax(x, None, 0.3, causal=True),
    ),
    "ScaledSoftmax": (
        ours.ScaledSoftmax,
        lambda x, mask: ours.ScaledSoftmax.apply(x, 0.3),
        lambda x, mask: fusedops.scaled_masked_softmax(x, None, 0.3),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_apply_is_the_op(name: str, dtype: torch.dtype) -> None:
    _, apply, op = FUNCTIONS[name]
    x, mask = tensor(B, NP, SQ, SK, dtype=dtype), masked(B, 1, SQ, SK)
    got, want = with_gradients(lambda x: apply(x, mask), x), with_gradients(lambda x: op(x, mask), x)
    assert_close(got, want, atol=0, rtol=0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_and_backward_serve_subclasses_and_compile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, apply, op = FUNCTIONS[name]
    x, mask = tensor(B, NP, SQ, SK), masked(B, 1, SQ, SK)
    want = with_gradients(lambda x: op(x, mask), x)
    torch._dynamo.reset()
    compiled = torch.compile(apply, backend="aot_eager", fullgraph=True)
    assert_close(with_gradients(lambda x: compiled(x, mask), x), want)

    class Sub(cls):
        called = False

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            Sub.called = True
            return cls.forward(ctx, *args)

    monkeypatch.setattr(ours, name, Sub)
    assert_close(with_gradients(lambda x: apply(x, mask), x), want)
    assert Sub.called


def test_functions_under_torch_func() -> None:
    x, mask = tensor(B, NP, SQ, SK), masked(B, 1, SQ, SK)

    def gradient(function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return torch.func.grad(lambda x: (function(x, mask) ** 2).sum())(x)

    for _, apply, op in FUNCTIONS.values():
        assert_close(gradient(apply), gradient(op))


def test_grad_output_is_not_written() -> None:
    """apex's causal backward writes into it: apex#1430, #1587."""
    x = tensor(4, SQ, SK).requires_grad_()
    grad = tensor(4, SQ, SK, seed=2)
    before = grad.clone()
    ours.ScaledUpperTriangMaskedSoftmax.apply(x, 0.5).backward(grad)
    assert torch.equal(grad, before)


@pytest.mark.parametrize("name", ["ScaledMaskedSoftmax", "ScaledUpperTriangMaskedSoftmax", "ScaledSoftmax"])
def test_as_the_cuda_kernels_of_the_original(peer: Any, name: str) -> None:
    extension = {
        "ScaledMaskedSoftmax": "scaled_masked_softmax_cuda",
        "ScaledUpperTriangMaskedSoftmax": "scaled_upper_triang_masked_softmax_cuda",
        "ScaledSoftmax": "scaled_softmax_cuda",
    }[name]
    pytest.importorskip(extension, reason=f"needs {extension}, apex's CUDA extension")
    shape = (8, 32, 32) if "Triang" in name else (4, 2, 32, 32)
    x = tensor(*shape, dtype=torch.float16).cuda()
    args = (masked(4, 1, 32, 32).cuda(), 0.3) if name == "ScaledMaskedSoftmax" else (0.3,)
    want = with_gradients(lambda x: getattr(peer.softmax, name).apply(x, *args), x)
    assert_same(with_gradients(lambda x: getattr(ours, name).apply(x, *args), x), want, torch.float16)


# ------------------------------------------------------------------------------------------ apex's functional forms


def test_functional_forms() -> None:
    x, mask = tensor(B, NP, SQ, SK), masked(B, 1, SQ, SK)
    op = fusedops.scaled_masked_softmax
    assert torch.equal(ours.scaled_masked_softmax(x, mask, 0.3), op(x, mask, 0.3))
    assert torch.equal(ours.scaled_masked_softmax(x, None, 0.3), op(x, None, 0.3))
    assert torch.equal(ours.generic_scaled_masked_softmax(x, mask, 0.3), op(x, mask, 0.3))
    assert torch.equal(ours.scaled_softmax(x, 0.3), op(x, None, 0.3))
    assert torch.equal(ours.scaled_upper_triang_masked_softmax(x, None, 0.3), op(x, None, 0.3, causal=True))
    assert torch.equal(ours.scaled_upper_triang_masked_softmax(x, mask, 0.3), op(x, mask, 0.3, causal=True))
    with pytest.raises(AssertionError, match="causal mask is only for self attention; input has 4 queries and 8 keys"):
        ours.scaled_upper_triang_masked_softmax(x[:, :, :4], None, 0.3)


def test_functional_forms_take_the_dtype_of_autocast() -> None:
    x, mask = tensor(B, NP, SQ, SK), masked(B, 1, SQ, SK)
    with torch.autocast("cpu", torch.bfloat16):
        for y in (
            ours.scaled_masked_softmax(x, mask, 0.3),
            ours.generic_scaled_masked_softmax(x, mask, 0.3),
            ours.scaled_upper_triang_masked_softmax(x, None, 0.3),
            ours.scaled_softmax(x, 0.3),
        ):
            assert y.dtype == torch.bfloat16
        assert ours.scaled_softmax(x.double(), 0.3).dtype == torch.float64
    assert ours.scaled_softmax(x, 0.3).dtype == torch.float32


def test_generic_module() -> None:
    x, mask = tensor(B, NP, SQ, SK), masked(B, 1, SQ, SK)
    module = ours.GenericFusedScaleMaskSoftmax(False, False, True, None, True, 0.3)
    assert torch.equal(module(x, mask), fusedops.scaled_masked_softmax(x, mask, 0.3))


# ----------------------------------------------------------------------------------------------------- bias and GELU


PAIRS = [
    *((dtype, dtype) for dtype in (*DTYPES, torch.float64)),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float16),
]


@pytest.mark.parametrize(("dtype", "bias_dtype"), PAIRS)
@pytest.mark.parametrize("shape", [(16,), (1, 16), (6, 1), (6, 16)])
def test_gelu_as_megatron(peer: Any, dtype: torch.dtype, bias_dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    y, bias = tensor(4, 6, 16, dtype=dtype), tensor(*shape, dtype=bias_dtype, seed=1)
    coarse = max(dtype, bias_dtype, key=lambda d: torch.finfo(d).eps)
    with megatron_peer.on_cpu():
        plain = with_gradients(peer.gelu.bias_gelu, bias, y)
        function = with_gradients(peer.gelu.GeLUFunction.apply, y, bias)
    # ten steps in the narrow dtype there, and sums of values up to 6
    assert_same(with_gradients(ours.bias_gelu, bias, y), plain, coarse, roundings=10)
    assert_same(with_gradients(ours.GeLUFunction.apply, y, bias), function, coarse, roundings=10)
    assert_same(with_gradients(ours.bias_gelu_impl, y, bias), function, coarse, roundings=10)


@pytest.mark.parametrize("dtypes", [*((d, d, d) for d in DTYPES), (torch.bfloat16, torch.float32, torch.bfloat16)])
def test_gelu_back_as_megatron(peer: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    g, bias, y = (tensor(*s, dtype=d, seed=n) for n, (s, d) in enumerate(zip([(6, 16), (16,), (6, 16)], dtypes)))
    with megatron_peer.on_cpu():
        want = peer.gelu.bias_gelu_back(g, bias, y)
    coarse = max(dtypes, key=lambda d: torch.finfo(d).eps)
    assert_same([ours.bias_gelu_back(g, bias, y)], [want], coarse, roundings=10)


def test_gelu_is_closer_than_megatron(peer: Any) -> None:
    """The sum is rounded once there and the rest at each step; here all is in float32."""
    y, bias = tensor(64, 256, dtype=torch.bfloat16), tensor(256, dtype=torch.bfloat16, seed=1)
    exact = torch.nn.functional.gelu(y.double() + bias.double(), approximate="tanh")
    with megatron_peer.on_cpu():
        theirs = (peer.gelu.bias_gelu(bias, y).double() - exact).abs().mean()
    assert (ours.bias_gelu(bias, y).double() - exact).abs().mean() < theirs


def test_gelu_without_a_bias() -> None:
    """Megatron's comment says that the bias is optional; its code then fails."""
    x = tensor(4, 16)
    want = with_gradients(lambda x: torch.nn.functional.gelu(x, approximate="tanh"), x)
    assert_same(with_gradients(lambda x: ours.GeLUFunction.apply(x, None), x), want, torch.float32)
    assert_same(with_gradients(lambda x: ours.bias_gelu(None, x), x), want, torch.float32)
    assert_close(
        ours.bias_gelu_back(torch.ones_like(x), None, x), torch.func.grad(lambda x: ours.bias_gelu(None, x).sum())(x)
    )


def test_gelu_function_by_hand_in_a_subclass_and_compiled() -> None:
    x, bias = tensor(4, 16), tensor(16, seed=1)
    want = with_gradients(lambda x, bias: fusedops.bias_gelu(x, bias), x, bias)

    class Sub(ours.GeLUFunction):
        pass

    torch._dynamo.reset()
    compiled = torch.compile(ours.bias_gelu_impl, backend="aot_eager", fullgraph=True)
    for apply in (ours.GeLUFunction.apply, Sub.apply, compiled):
        assert_close(with_gradients(apply, x, bias), want)

    class Context:
        saved_tensors: tuple[Any, ...] = ()

        def save_for_backward(self, *tensors: Any) -> None:
            self.saved_tensors = tensors

    context = Context()
    y = ours.GeLUFunction.forward(context, x, bias)
    assert_close([y, *ours.GeLUFunction.backward(context, tensor(*y.shape, seed=9))], want)


def test_gelu_twice_differentiable() -> None:
    x, bias = tensor(3, 4).double().requires_grad_(), tensor(4, seed=1).double().requires_grad_()
    torch.autograd.gradgradcheck(ours.bias_gelu_impl, (x, bias))


# ------------------------------------------------------------------------------------------------- bias, dropout, add


def versions(library: Any, training: bool) -> list[Callable[..., Tensor]]:
    module = library if library is ours else library.dropout
    return [
        module.get_bias_dropout_add(training, True),
        module.get_bias_dropout_add(training, False),
        module.bias_dropout_add_unfused(training),
        module.bias_dropout_add_fused_train if training else module.bias_dropout_add_fused_inference,
        lambda pair, residual, prob: module._bias_dropout_add_func(pair, residual, prob, training),
    ]


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("training", "p"), [(True, 0.0), (False, 0.0), (False, 0.3)])
def test_dropout_add_as_megatron(peer: Any, training: bool, p: float, dtype: torch.dtype, with_bias: bool) -> None:
    x, residual = tensor(4, 16, dtype=dtype), tensor(4, 16, dtype=dtype, seed=2)
    bias = tensor(16, dtype=dtype, seed=1) if with_bias else None

    def results(function: Callable[..., Tensor]) -> list[Tensor | None]:
        return with_gradients(lambda x, bias, residual: function((x, bias), residual, p), x, bias, residual)

    for mine, theirs in zip(versions(ours, training), versions(peer, training)):
        with megatron_peer.on_cpu():
            want = results(theirs)
        assert_same(results(mine), want, dtype)
        # without gradients: evaluation is in place, and the answer is x itself
        for library, function in ((ours, mine), (peer, theirs)):
            given, before = x.clone(), residual.clone()
            with megatron_peer.on_cpu() if library is peer else torch.no_grad():
                y = function((given, bias), residual, p)
            assert_same([y], want[:1], dtype)
            assert (y.data_ptr() == given.data_ptr()) is not training
            assert torch.equal(residual, before)


@pytest.mark.parametrize("needs", ["x", "bias", "residual"])
def test_evaluation_is_not_in_place_where_an_input_requires_grad(peer: Any, needs: str) -> None:
    for library in (ours, peer):
        tensors = {"x": tensor(4, 16), "bias": tensor(16, seed=1), "residual": tensor(4, 16, seed=2)}
        tensors[needs].requires_grad_()
        before = tensors["x"].detach().clone()
        with megatron_peer.on_cpu():
            y = versions(library, False)[0]((tensors["x"], tensors["bias"]), tensors["residual"], 0.1)
        assert y.requires_grad
        assert torch.equal(tensors["x"], before)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("dtype", "residual_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_mixed_dtypes(peer: Any, dtype: torch.dtype, residual_dtype: torch.dtype, training: bool) -> None:
    x, bias, residual = tensor(4, 16, dtype=dtype), tensor(16, dtype=dtype, seed=1), tensor(4, 16, dtype=residual_dtype)
    before = x.clone()
    y = ours.get_bias_dropout_add(training, True)((x, bias), residual, 0.0)
    assert y.dtype == residual_dtype
    assert torch.equal(x, before)  # not in place: x cannot hold the answer
    with megatron_peer.on_cpu():
        theirs = peer.dropout.get_bias_dropout_add(training, True)((x.clone(), bias), residual, 0.0)
    # Megatron narrowed a float32 residual to x's dtype until 0.17 (Megatron#3504)
    assert theirs.dtype == (residual_dtype if peer.version >= (0, 17) else dtype)
    assert_same([y], [theirs.to(residual_dtype)], torch.bfloat16)


def test_fused_and_unfused_drop_the_same() -> None:
    """No peer's do: theirs draw in different orders."""
    x, bias, residual = tensor(64, 16), tensor(16, seed=1), tensor(64, 16, seed=2)
    drawn: list[Tensor] = []
    for function in versions(ours, True):
        torch.manual_seed(7)
        drawn.append(function((x, bias), residual, 0.4))
    for y in drawn[1:]:
        assert torch.equal(y, drawn[0])
    kept = drawn[0] != residual
    assert 0.5 < kept.double().mean() < 0.7
    assert_close(drawn[0][kept], (residual + (x + bias) / 0.6)[kept])


def test_dropout_add_compiled() -> None:
    x, bias, residual = tensor(4, 16), tensor(16, seed=1), tensor(4, 16, seed=2)
    for training in (True, False):
        torch._dynamo.reset()
        function = ours.get_bias_dropout_add(training, True)
        given = x.clone()
        y = torch.compile(function, backend="aot_eager", fullgraph=True)((given, bias), residual, 0.0)
        assert_close(y, residual + x + bias)
        assert torch.equal(given, x if training else y)
