"""Megatron's SoftmaxOne and mask functions: the drop-ins beside megatron-core itself."""

from __future__ import annotations

from typing import Any

import megatron_peer
import pytest
import torch
from megatron_cases import NP, SK, SQ, B, assert_same, tensor, with_gradients
from torch.testing import assert_close

from fusedops.compat import megatron as ours

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own


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
