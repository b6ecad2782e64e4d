"""Padded calls of the npu softmax kernel on the stand-in device."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from right import assert_right
from softmax_calls import OP
from standin import npu_device

import fusedops
from fusedops import TensorSpec, tensor_cache


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("given", [None, (2, 1, 50, 100), (2, 1, 1, 100), (50, 100), (50, 1)], ids=str)
def test_a_length_of_100_is_padded(
    torch_npu: ModuleType, given: tuple[int, ...] | None, dtype: torch.dtype, causal: bool
) -> None:
    x = torch.randn(2, 3, 50, 100).to(dtype)
    mask = None if given is None else torch.rand(given) < 0.4
    if mask is not None and mask.shape[-2] > 1:
        mask[..., 3, :] = True  # a fully masked row
    with fusedops.use("npu", fallback="raise", adapt="pad"):
        assert_right(OP.name, x, mask, 0.125, causal=causal, device="npu")
    assert [call.shapes[0] for call in torch_npu.calls] == [(2, 3, 64, 128)] * 2


def test_explain_states_the_bytes_of_padding(torch_npu: ModuleType) -> None:
    x, mask = TensorSpec((2, 3, 64, 100), torch.float16, "npu"), TensorSpec((2, 1, 1, 100), torch.bool, "npu")
    with fusedops.use(adapt="pad"):
        decision = fusedops.explain(OP.name, x, mask)
    (npu,) = [v for v in decision.candidates if v.backend == "npu"]
    tensor = 2 * 3 * 64 * 128 * 2
    assert (decision.backend, decision.backward) == ("npu", "npu")
    assert [(a.name, a.direction, a.bytes) for a in npu.adaptations] == [
        ("pad", "forward", 2 * tensor + 2 * 128),
        ("mask", "forward", 2 * 64 * 128),
        ("pad", "backward", 3 * tensor),
        ("no-mask", "backward", 64 * 128),
    ]
    assert f"and the result cropped: {2 * tensor + 256:,} bytes" in str(decision)


@tensor_cache.reuse()
def test_a_padded_mask_too_is_inspected_once(torch_npu: ModuleType) -> None:
    mask = (torch.rand(2, 1, 1, 100) < 0.3).to("npu")
    x = torch.randn(2, 3, 64, 100).to("npu")
    npu_device.reset()
    with fusedops.use("npu", fallback="raise", adapt="pad"):
        for _ in range(24):
            fusedops.scaled_masked_softmax(x, mask[:])
    assert npu_device.synchronisations() == 1
    counted = npu_device.kernels()
    assert counted["npu_scaled_masked_softmax"] == 24
    assert counted["all"] == counted["any"] == 1
