"""Calls that no autograd makes: nothing is read or written out of bounds, and no input is changed."""

from __future__ import annotations

import pytest
import torch

import fusedops
from fusedops import InvalidInputError

pytestmark = pytest.mark.usefixtures("on_cpu")

OPS = torch.ops.fusedops


def test_a_gradient_of_another_shape() -> None:
    y = torch.rand(8, 64)
    for grad in (torch.rand(8, 32), torch.rand(4)):
        with pytest.raises(InvalidInputError, match="got grad"):
            OPS.scaled_masked_softmax_backward(grad, y, 1.0, False)
    with pytest.raises(InvalidInputError, match="got grad"):
        OPS.bias_gelu_backward(torch.rand(4, 64), torch.rand(8, 64), None, "tanh", [True, False])
    with pytest.raises(InvalidInputError, match="got bias"):
        OPS.bias_gelu_backward(torch.rand(8, 64), torch.rand(8, 64), torch.rand(6), "tanh", [True, True])


@pytest.mark.parametrize("op", ["bias_dropout", "bias_dropout_add"])
def test_backward_of_dropout(op: str) -> None:
    backward = getattr(OPS, f"{op}_backward")
    grad, seed = torch.rand(8, 64), torch.tensor([1])
    with pytest.raises(InvalidInputError, match="got bias"):
        backward(grad, seed, torch.rand(6), 0.5, True, torch.float32, [True, True])
    for wrong in (None, torch.tensor([1, 2]), torch.tensor([1], dtype=torch.int32)):
        with pytest.raises(InvalidInputError, match="got seed"):
            backward(grad, wrong, None, 0.5, True, torch.float32, [True, False])
    with pytest.raises(InvalidInputError, match="got p"):
        backward(grad, seed, None, 1.5, True, torch.float32, [True, False])


def test_a_tensor_whose_memory_was_freed() -> None:
    x = torch.rand(8, 64)
    x.untyped_storage().resize_(0)
    with pytest.raises(InvalidInputError, match="without memory"):
        fusedops.bias_gelu(x)


def test_tensors_with_the_negative_bit() -> None:
    values = torch.randn(6, 10)
    negative = torch._neg_view(values.clone())
    assert negative.is_neg()
    assert torch.equal(fusedops.bias_gelu(negative), fusedops.bias_gelu(-values))
    assert torch.equal(fusedops.scaled_masked_softmax(negative), fusedops.scaled_masked_softmax(-values))
    bias = torch._neg_view(values[0].clone())
    assert torch.equal(fusedops.bias_gelu(values, bias), fusedops.bias_gelu(values, -values[0]))
    one = torch.imag(torch.tensor([1 + 2j]).conj())  # one element: contiguous, whatever its stride
    assert torch.equal(fusedops.bias_gelu(one), fusedops.bias_gelu(torch.tensor([-2.0])))


def test_no_input_is_written() -> None:
    x, bias, residual = (torch.randn(shape, requires_grad=True) for shape in ((33, 70), (70,), (33, 70)))
    mask = torch.rand(33, 70) > 0.5
    grad = torch.randn(33, 70)
    before = [t.detach().clone() for t in (x, bias, residual, mask, grad)]
    fusedops.scaled_masked_softmax(x, mask, causal=True).backward(grad)
    fusedops.bias_gelu(x, bias).backward(grad)
    fusedops.bias_dropout(x, bias, 0.5, seed=1).backward(grad)
    fusedops.bias_dropout_add(x, bias, residual, 0.5, seed=1).backward(grad)
    assert all(torch.equal(a.detach(), b) for a, b in zip((x, bias, residual, mask, grad), before, strict=True))


def test_results_are_no_views_of_inputs() -> None:
    residual = torch.randn(4, 5)
    assert fusedops.bias_dropout_add(residual, None, residual, 1.0, seed=1).data_ptr() != residual.data_ptr()


@pytest.mark.parametrize(
    "call",
    [
        lambda: fusedops.bias_gelu(torch.rand(2, 3, dtype=torch.float64)),
        lambda: fusedops.bias_gelu(torch.rand(2, 3), torch.rand(2, 1)),
        lambda: fusedops.bias_gelu(torch.rand(2, 3), torch.rand(3).bfloat16()),
        lambda: fusedops.bias_dropout_add(torch.rand(2, 3).half(), None, torch.rand(2, 3), 0.5, seed=1),
        lambda: fusedops.scaled_masked_softmax(torch.rand(2, 3, dtype=torch.float64)),
    ],
    ids=["float64", "a bias for each row", "two dtypes", "a residual of another dtype", "float64 scores"],
)
def test_refused(call: object) -> None:
    with pytest.raises(fusedops.NoBackendError):
        call()  # type: ignore[operator]
