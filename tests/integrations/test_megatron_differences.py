"""Where the drop-ins for Megatron differ from megatron-core: the differences that the docs list."""

from __future__ import annotations

from typing import Any

import megatron_peer
import pytest
import torch
from megatron_cases import NP, SK, SQ, B, masked, modules, tensor, with_gradients
from torch.testing import assert_close

import fusedops
from fusedops.compat import megatron as ours

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own


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


def test_a_wider_offset_does_not_widen_the_result() -> None:
    module = ours.FusedScaleMaskSoftmax(False, True, ours.AttnMaskType.padding, True, None, False, None)
    y = module(torch.randn(1, 2, 4, 4).bfloat16(), None, torch.zeros(2))
    assert y.dtype == torch.bfloat16
