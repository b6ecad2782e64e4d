"""The npu kernel of bias_gelu, and what the vendor lacks, on the stand-in device."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

import fusedops
from fusedops import TensorSpec, testing
from fusedops.__main__ import main


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [None, (96,), (5, 1)], ids=str)
def test_bias_gelu_is_the_vendors_in_both_forms(
    torch_npu: ModuleType, approximate: str, dtype: torch.dtype, bias: tuple[int, ...] | None
) -> None:
    op = testing.OPS["bias_gelu"]
    x, added = torch.randn(4, 5, 96).to(dtype), None if bias is None else torch.randn(bias).to(dtype)
    want_y = testing.expected(op, (x, added, approximate))
    leaves = [None if t is None else t.to("npu").requires_grad_() for t in (x, added)]
    with fusedops.use("npu", fallback="raise"):
        y = fusedops.bias_gelu(*leaves, approximate=approximate)
        y.backward(want_y.grad.to(dtype).to("npu"))
    testing.assert_within(y, want_y.y, op.evidence.tolerance[dtype], "y")
    for name, leaf in zip(("x", "bias"), leaves):
        if leaf is not None:
            testing.assert_within(leaf.grad, want_y.gradients[name], op.evidence.gradient_tolerance[dtype], name)
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
    args = list(testing.arguments(op, testing.shrunk(op.evidence.cases[0], 2**12), torch.float32, "npu"))
    want_y = testing.expected(op, args)
    for parameter in want_y.gradients:
        args[op.parameters.index(parameter)].requires_grad_()
    y = op.call_public(*args)  # no warning: no policy names npu for it
    y.backward(want_y.grad.float().to("npu"))
    assert y.device.type == "npu"
    testing.assert_within(y, want_y.y, op.evidence.tolerance[torch.float32], "y")
    for parameter, gradient in want_y.gradients.items():
        got = args[op.parameters.index(parameter)].grad
        testing.assert_within(got, gradient, op.evidence.gradient_tolerance[torch.float32], parameter)
    assert not torch_npu.calls
    decision = fusedops.explain(name, *args[:2], *args[2:3] if name == "bias_dropout_add" else ())
    assert (decision.backend, decision.backward) == ("eager", "eager")
    assert main(["matrix"]) == 0
    results = " ".join(capsys.readouterr().out.partition(f"{name}:")[2].partition("\nbias")[0].split())
    assert "npu none no kernel: another backend serves on npu" in results
