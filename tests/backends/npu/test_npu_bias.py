"""The npu kernel of bias_gelu, and what the vendor lacks, on the stand-in device."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from right import assert_right

import fusedops
from fusedops import TensorSpec, testing
from fusedops.__main__ import main


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [None, (96,), (5, 1)], ids=str)
def test_bias_gelu_is_the_vendors_in_both_forms(
    torch_npu: ModuleType, approximate: str, dtype: torch.dtype, bias: tuple[int, ...] | None
) -> None:
    x, added = torch.randn(4, 5, 96).to(dtype), None if bias is None else torch.randn(bias).to(dtype)
    with fusedops.use("npu", fallback="raise"):
        assert_right("bias_gelu", x, added, approximate=approximate, device="npu")
    results = [(call.name, call.options) for call in torch_npu.calls]
    assert results == [("npu_gelu", {"approximate": approximate}), ("npu_gelu_backward", {"approximate": approximate})]


def test_the_sum_of_bias_gelu_is_stated(torch_npu: ModuleType) -> None:
    def bytes_of(x: torch.dtype, bias: torch.dtype | None) -> list[tuple[str, int]]:
        spec = None if bias is None else TensorSpec((96,), bias, "npu")
        decision = fusedops.explain("bias_gelu", TensorSpec((4, 96), x, "npu"), spec)
        return [(a.direction, a.bytes // (4 * 4 * 96)) for v in decision.candidates for a in v.adaptations]

    assert bytes_of(torch.bfloat16, None) == []
    assert bytes_of(torch.float32, torch.float32) == [("forward", 1), ("backward", 1)]
    assert bytes_of(torch.bfloat16, torch.bfloat16) == [("forward", 3), ("backward", 3)]
    assert bytes_of(torch.bfloat16, torch.float32) == [("forward", 2), ("backward", 2)]


@pytest.mark.parametrize("name", ["bias_dropout", "bias_dropout_add"])
def test_what_the_vendor_lacks_runs_eager_on_the_device(
    torch_npu: ModuleType, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    op = testing.OPS[name]
    args = list(testing.arguments(op, testing.shrunk(op.evidence.cases[0], 2**12), torch.float32))
    assert_right(name, *args[:-2], training=args[-2], seed=args[-1], device="npu")  # no warning: no policy names npu
    assert not torch_npu.calls
    tensors = [arg.to("npu") for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()]
    decision = fusedops.explain(name, *tensors)
    assert (decision.backend, decision.backward) == ("eager", "eager")
    assert main(["matrix"]) == 0
    results = [line.split() for line in capsys.readouterr().out.splitlines()]
    npu = next(line for line in results if line[:1] == ["op"]).index("npu")
    assert next(line for line in results if line[:1] == [name])[npu] == "-"
