"""Megatron's FusedScaleMaskSoftmax, SoftmaxOne and functions of masks: the drop-ins beside megatron-core itself."""

from __future__ import annotations

import inspect
import itertools
import math
from typing import Any

import megatron_peer
import pytest
import torch
from megatron_cases import DTYPES, NP, SK, SQ, B, assert_same, flags, masked, modules, tensor, with_gradients
from torch import Tensor
from torch.testing import assert_close

import fusedops
from fusedops.compat import megatron as ours

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own


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


@pytest.mark.parametrize("kind", ["causal", "padding"])
def test_the_type_of_mask_is_recognized_by_its_name(peer: Any, kind: str) -> None:
    x = tensor(B, NP, SQ, SK)
    want = fusedops.scaled_masked_softmax(x, None, 0.5, causal=kind == "causal")
    for given in (kind, ours.AttnMaskType[kind], peer.enums.AttnMaskType[kind]):
        assert torch.equal(ours.FusedScaleMaskSoftmax(False, False, given, True, None, True, 0.5)(x, None), want)


def test_the_repr_of_the_module() -> None:
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


# -------------------------------------------------------------------------------- SoftmaxOne and the functions of masks


@pytest.mark.parametrize("dim", [None, -1])
def test_softmax_one_as_megatron(peer: Any, dim: int | None) -> None:
    x, offset = tensor(B, NP, SQ, 5), tensor(NP, seed=3)
    want = with_gradients(lambda x, offset: peer.softmax.SoftmaxOne(dim, offset)(x), x, offset)
    assert_same(with_gradients(lambda x, offset: ours.SoftmaxOne(dim, offset)(x), x, offset), want, torch.float32)
    exp = x.double().exp()
    assert_close(ours.SoftmaxOne(-1, torch.zeros(1))(x).double(), exp / (1 + exp.sum(-1, keepdim=True)))


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
