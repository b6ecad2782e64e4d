"""warm_up: it makes the calls that load kernels, and leaves no trace. Captures are in backends/triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import sample

import fusedops
from fusedops import TensorSpec, testing

CALLS: list[tuple[str, tuple[Any, ...]]] = []


@pytest.fixture
def recording(fusedops_isolated: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend that records the calls of its kernels for rms_norm, with the saved values wanted and the gradients."""
    op = testing.OPS["rms_norm"]
    CALLS.clear()

    def forward(x: Any, weight: Any, eps: float, offset: float, save: bool) -> Any:
        CALLS.append(("forward", (x, save)))
        return op.reference_with_saved(x, weight, eps, offset, save)

    def backward(grad: Any, x: Any, rstd: Any, weight: Any, offset: float, needs: tuple[bool, ...]) -> Any:
        CALLS.append(("backward", (grad, needs)))
        return op.backward(grad, x, rstd, weight, offset, needs)

    kernels = (fusedops.kernel(op.name)(forward), fusedops.kernel(op.name, direction="backward")(backward))
    fusedops.register(fusedops.Backend("recording", ("cpu",), 500, kernels))
    return "recording"


def test_specs_warm_inference_and_training_with_every_gradient(recording: str) -> None:
    decision = fusedops.warm_up("rms_norm", TensorSpec((4, 8), torch.bfloat16), TensorSpec((8,)))
    assert (decision.backend, decision.backward) == (recording, recording)
    assert [(name, rest[1]) for name, rest in CALLS] == [
        ("forward", False), ("forward", True), ("backward", (True, True)),
    ]  # fmt: skip
    x = CALLS[0][1][0]
    assert (x.shape, x.dtype, x.is_contiguous()) == ((4, 8), torch.bfloat16, True)


def test_a_real_tensor_is_used_with_its_layout_and_the_gradients_that_it_requires(recording: str) -> None:
    memory = torch.randn(4, 10)
    x, weight = memory[:, 1:9], torch.ones(8, requires_grad=True)
    before = memory.clone()
    fusedops.warm_up(fusedops.rms_norm, x, weight=weight)
    assert [(name, rest[1]) for name, rest in CALLS] == [
        ("forward", False), ("forward", True), ("backward", (False, True)),
    ]  # fmt: skip
    used = CALLS[0][1][0]
    assert (used.data_ptr(), used.stride()) == (x.data_ptr(), x.stride())
    assert torch.equal(memory, before)
    assert weight.grad is None
    assert CALLS[2][1][0].is_contiguous()


def test_without_a_gradient_there_is_no_backward(recording: str) -> None:
    with torch.inference_mode():
        fusedops.warm_up("rms_norm", torch.randn(4, 8))
    with torch.no_grad():
        fusedops.warm_up("rms_norm", torch.randn(4, 8))
    assert [(name, rest[1]) for name, rest in CALLS] == [("forward", False)] * 2


@pytest.mark.parametrize("name", list(testing.OPS))
def test_every_op_from_specs_and_the_generator_is_as_before(name: str) -> None:
    op = testing.OPS[name]
    args = testing.arguments(op, fusedops.Case("sample", dict(sample(name))), torch.float32)
    call = {n: TensorSpec.of(arg) if isinstance(arg, torch.Tensor) else arg for n, arg in zip(op.parameters, args)}
    call = {n: value for n, value in call.items() if n != "seed" or op.signature.parameters[n].default is not None}
    state = torch.get_rng_state()
    assert fusedops.warm_up(name, **call).backend
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: fusedops.warm_up("no_op"), fusedops.PolicyError, "warm_up: got op 'no_op', expected one of"),
        (
            lambda: fusedops.warm_up("bias_gelu", TensorSpec((2, 4), device="hpu:1")),
            fusedops.InvalidInputError,
            "warm_up: got x on hpu:1, expected a device",
        ),
        (
            lambda: fusedops.warm_up("bias_gelu", TensorSpec((2, 4)), TensorSpec((3,))),
            fusedops.InvalidInputError,
            "bias_gelu: got bias",
        ),
        (
            lambda: fusedops.warm_up("bias_gelu", TensorSpec((2, 4)), backend="npu", approximate="x"),
            fusedops.InvalidInputError,
            "bias_gelu: got approximate",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_called_is_an_error(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text.replace("(", r"\(")):
        call()
