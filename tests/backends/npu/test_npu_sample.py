"""sample on Ascend: eager draws on the device, for the vendor's function has the noise by the rank in its sort."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

import fusedops


def test_the_tokens_are_those_of_the_cpu(torch_npu: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    call: dict[str, Any] = {"logits": torch.randn(9, 70, generator=generator), "top_p": torch.rand(9), "seed": 3}
    call |= {"position": torch.arange(9), "temperature": 0.7, "top_k": 40, "min_p": 0.01, "return_log_prob": "filtered"}
    on_device = {name: value.to("npu") if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    assert "without a kernel for it: npu" in str(fusedops.explain("sample", **on_device))
    for got, wanted in zip(fusedops.sample(**on_device), fusedops.sample(**call, backend="eager"), strict=True):
        assert got.device.type == "npu"
        torch.testing.assert_close(got.cpu(), wanted)
