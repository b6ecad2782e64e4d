"""Backward calls that autograd did not make: each tensor has the shape, dtype and device of the call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from calls import OPTIONS, arguments, call_registered, growing, inputs, loss
from torch import Tensor
from two_outputs import OP as TWO_OUTPUTS_OP
from two_outputs import two_outputs

import fusedops
from fusedops import InvalidInputError
from fusedops.compat import megatron
from fusedops.testing import OPS

TWO_OUTPUTS = TWO_OUTPUTS_OP.name
every_op = pytest.mark.parametrize("op", [*OPTIONS, TWO_OUTPUTS])


@pytest.fixture(autouse=True)
def registered(request: pytest.FixtureRequest) -> Any:
    """The op with two outputs and saved values is registered where a test is about it."""
    with two_outputs() if TWO_OUTPUTS in request.node.name else nullcontext():
        yield


def backward_call(op: str) -> dict[str, Any]:
    """Return the arguments of a valid backward call by name."""
    contract, args = OPS[op], arguments(op, inputs(op, dtype=torch.float32))
    outputs = contract.as_tuple(contract.reference(*args))
    results = [*outputs, *contract.saved_references(args, outputs)]
    grads = [torch.ones_like(y) for y in outputs[: len(contract.with_gradient)]]
    needs = tuple(args[contract.parameters.index(name)] is not None for name in contract.differentiable)
    return dict(zip(contract.backward_parameters, contract.backward_arguments(grads, results, args, needs)))


def run(op: str, call: dict[str, Any]) -> Any:
    return getattr(torch.ops.fusedops, f"{op}_backward")(*call.values())


@every_op
def test_a_valid_call_is_served(op: str) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        y = call_registered(op, *arguments(op, growing(op, inputs(op, dtype=dtype))))
        loss(y).backward()  # by the registered backward
    call = backward_call(op)
    meta = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in call.items()}
    for got, want in zip(_tuple(run(op, meta)), _tuple(run(op, call))):
        assert (got.shape, got.dtype, got.device.type) == (want.shape, want.dtype, "meta")


def _tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "fewer rows": lambda t: t[:1] if t.dim() > 1 else t[: t.numel() - 1] if t.dim() else t,
    "one column": lambda t: t[..., :1] if t.dim() else t,
    "a longer one": lambda t: torch.cat([t, t], -1) if t.dim() else t.expand(3),
    "a scalar": lambda t: t.sum(),
    "one dimension more": lambda t: t.expand(2, *t.shape),
    "another dtype": lambda t: t.to(torch.float64),
    "integers": lambda t: t.to(torch.int32),
    "another device": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
}


@every_op
@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_is_not_of_the_call_is_invalid(op: str, change: str) -> None:
    contract, call = OPS[op], backward_call(op)
    names = [*contract.backward_call.grads, *contract.outputs, *(value.name for value in contract.saved)]
    # where backward takes neither x nor an output, a gradient of another shape is a call of that shape
    only_grad = not {contract.parameters[0], *contract.outputs} & set(call)
    raised = 0
    for name in (name for name in names if name in call):
        other = CHANGES[change](call[name])
        if _metadata(other) == _metadata(call[name]):
            continue
        for device in ("cpu", "meta") if change not in ("another device", "sparse") else ("cpu",):
            changed = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in call.items()}
            changed[name] = other if device == "cpu" else other.to(device)
            text = _error(op, changed)
            raised += text != ""
            if text:
                assert text.startswith(f"{op}_backward: got ")
                assert ", expected " in text
                assert "; to fix: " in text
            else:
                assert only_grad, f"{name} of {other.shape} and {other.dtype} was taken"
                place = min(names.index(name), len(contract.differentiable) - 1)
                shape = _tuple(run(op, changed))[place].shape
                same = slice(None) if contract.first_in_backward is None else slice(-1)
                assert shape[same] == other.shape[same]
    assert raised or only_grad


def _error(op: str, call: dict[str, Any]) -> str:
    try:
        run(op, call)
    except InvalidInputError as error:
        return str(error)
    return ""


def _metadata(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def test_megatrons_function_takes_a_gradient_of_any_floating_dtype() -> None:
    y, bias = torch.randn(2, 4).half(), torch.randn(4)
    grad = torch.randn(2, 4)
    want = megatron.bias_gelu_back(grad, bias, y.float())
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        got = megatron.bias_gelu_back(grad.to(dtype), bias, y)
        assert got.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(got.float(), want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_direct_call_in_compiled_code(dynamic: bool) -> None:
    def direct(grad: Tensor, y: Tensor) -> Tensor:
        return torch.ops.fusedops.scaled_masked_softmax_backward(grad, y, 0.5, False)

    torch._dynamo.reset()
    compiled = torch.compile(direct, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for size in (3, 5):
        y = torch.softmax(torch.randn(2, size), -1)
        grad = torch.randn(2, size)
        torch.testing.assert_close(compiled(grad, y), direct(grad, y))
    with pytest.raises(Exception, match="of shape"):
        compiled(torch.ones(2, 1), torch.ones(2, 7))
    torch._dynamo.reset()


def test_a_plain_call_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd has checked the gradient already."""
    from fusedops._dispatch.registered import backward_check

    monkeypatch.setattr(backward_check, "_reason", None)
    x = torch.ones(2, 3, requires_grad=True)
    y = fusedops.bias_gelu(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="shape"):
        y.backward(torch.ones(2, 1))
