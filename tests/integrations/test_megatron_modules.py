"""The modules of the spec by themselves: norms that Megatron's torch norms refuse, and attention of any lengths."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import megatron_layers as layers
import pytest
import torch
from megatron_cases import tensor, with_gradients
from megatron_layers import config
from torch.testing import assert_close

import fusedops
from fusedops import FusedOpsWarning

pytestmark = [*layers.OWN_WARNINGS, pytest.mark.usefixtures("one_rank")]


def norm(**settings: Any) -> Any:
    from fusedops.integrations.megatron import Norm

    given = {"normalization": "LayerNorm", "layernorm_zero_centered_gamma": False, "sequence_parallel": False}
    return Norm(config=SimpleNamespace(**{**given, **settings}), hidden_size=8, eps=1e-3)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_starts_as_the_norm_itself(kind: str, zero_centered: bool, dtype: torch.dtype) -> None:
    module = norm(normalization=kind, layernorm_zero_centered_gamma=zero_centered).to(dtype)
    x = tensor(3, 8, dtype=dtype)
    own = torch.nn.RMSNorm if kind == "RMSNorm" else torch.nn.LayerNorm
    assert_close(module(x), own(8, eps=1e-3)(x.float()).to(dtype))
    assert set(module.state_dict()) == ({"weight"} if kind == "RMSNorm" else {"weight", "bias"})
    assert bool((module.weight == 0).all()) == zero_centered


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_weight_around_zero_is_not_rounded(kind: str) -> None:
    """1 + 2**-10 is 1 in bfloat16."""
    module = norm(normalization=kind, layernorm_zero_centered_gamma=True).to(torch.bfloat16)
    torch.nn.init.constant_(module.weight, 2.0**-10)
    x = tensor(64, 8)
    plain = norm(normalization=kind)
    torch.nn.init.constant_(plain.weight, 1 + 2.0**-10)
    module.bfloat16()
    assert_close(module(x), plain(x), rtol=1e-6, atol=1e-6)
    y, s = module(x, x)
    assert_close((y, s), (plain(x + x), x + x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("parallel", [False, True])
def test_parameters_are_marked_for_sequence_parallel(kind: str, parallel: bool) -> None:
    module = norm(normalization=kind, sequence_parallel=parallel)
    assert {parameter.sequence_parallel for parameter in module.parameters()} == {parallel}


def attentions(kind: str = "causal", **settings: Any) -> tuple[Any, Any]:
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from fusedops.integrations.megatron import CoreAttention

    given = (config(num_query_groups=2, **settings), 1, AttnMaskType[kind], "self")
    return CoreAttention(*given), DotProductAttention(*given)


def qkv(sq: int, sk: int) -> tuple[torch.Tensor, ...]:
    return tensor(sq, 3, 4, 8), tensor(sk, 3, 2, 8, seed=1), tensor(sk, 3, 2, 8, seed=2)


@pytest.mark.parametrize("kind", ["causal", "padding", "no_mask", "arbitrary"])
@pytest.mark.parametrize(("sq", "sk"), [(6, 6), (1, 6), (4, 6)])
@pytest.mark.parametrize(("masked", "window"), [(False, None), (True, None), (False, (2, 0)), (False, (2, 1))])
def test_attention_equals_megatrons_own(
    kind: str, sq: int, sk: int, masked: bool, window: tuple[int, int] | None
) -> None:
    ours, own = attentions(kind, window_size=window)
    mask = None
    if masked:
        mask = torch.rand(3, 1, sq, sk, generator=torch.Generator().manual_seed(4)) < 0.4
        mask = (mask | torch.ones(sq, sk).triu(1).bool()) if kind == "causal" and sq == sk else mask
        mask[..., 0] = False
    elif kind == "causal" and sq not in (1, sk) and window is None:
        for module in (ours, own):
            with pytest.raises(AssertionError, match="causal mask is only for self attention"):
                module(*qkv(sq, sk), None)
        return
    want = with_gradients(lambda *given: own(*given, None if mask is None else mask.clone()), *qkv(sq, sk))
    got = with_gradients(lambda *given: ours(*given, mask), *qkv(sq, sk))
    assert_close(got, want, atol=2e-5, rtol=5e-6)  # of gradients up to 20


def test_a_window_without_a_limit_before() -> None:
    ours, _ = attentions("causal", window_size=(-1, 0))
    plain, _ = attentions("causal")
    assert_close(ours(*qkv(6, 6), None), plain(*qkv(6, 6), None))


def test_a_window_and_a_mask_both_hold() -> None:
    mask = torch.rand(3, 1, 6, 6, generator=torch.Generator().manual_seed(4)) < 0.4
    mask[..., 0] = False
    for window in ((2, 0), (2, 1)):
        ours, _ = attentions("causal", window_size=window)
        plain, _ = attentions("arbitrary")
        away = fusedops.compat.megatron.get_sliding_window_causal_mask(6, 6, window, "cpu")
        assert_close(ours(*qkv(6, 6), mask), plain(*qkv(6, 6), mask | away))


@pytest.mark.parametrize(("kind", "alignment"), [("padding_causal", True), ("causal_bottom_right", "lower_right")])
def test_the_types_that_only_transformer_engine_has(kind: str, alignment: bool | str) -> None:
    ours, _ = attentions("no_mask")
    sq = 6 if alignment is True else 4
    from megatron.core.transformer.enums import AttnMaskType

    q, k, v = qkv(sq, 6)
    got = ours(q, k, v, None, attn_mask_type=AttnMaskType[kind])
    want = fusedops.attention(*(each.permute(1, 2, 0, 3) for each in (q, k, v)), causal=alignment)
    assert_close(got, want.permute(2, 0, 1, 3).reshape(sq, 3, -1))


def test_scores_that_overflow_float16_do_not_here() -> None:
    ours, _ = attentions("causal", fp16=True, apply_query_key_layer_scaling=True)
    q, k, v = (each.half() * 60 for each in qkv(6, 6))
    assert torch.isfinite(ours(q, k, v / 60, None)).all()


def test_dropout_drops_where_it_is_on() -> None:
    ours, _ = attentions("causal", attention_dropout=0.5)
    torch.manual_seed(0)
    with pytest.warns(FusedOpsWarning, match="attention_dropout"):
        first, second = ours(*qkv(6, 6), None), ours(*qkv(6, 6), None)
    assert not torch.equal(first, second)
    ours.eval()
    assert torch.equal(ours(*qkv(6, 6), None), ours(*qkv(6, 6), None))
