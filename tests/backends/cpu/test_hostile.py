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


def test_backward_of_norms_and_gates() -> None:
    x, weight, rstd = torch.rand(8, 64), torch.rand(64), torch.rand(8)
    with pytest.raises(InvalidInputError, match="got grad"):
        OPS.rms_norm_backward(torch.rand(8, 32), x, rstd, weight, 0.0, [True, True])
    with pytest.raises(InvalidInputError, match="got rstd"):
        OPS.rms_norm_backward(x, x, torch.rand(4), weight, 0.0, [True, True])
    with pytest.raises(InvalidInputError, match="got mean"):
        OPS.layer_norm_backward(x, x, torch.rand(4), rstd, weight, None, [True, True, False])
    with pytest.raises(InvalidInputError, match="got weight"):
        OPS.add_rms_norm_backward(x, x, x, rstd, torch.rand(32), 0.0, torch.float32, [True, True, True])
    with pytest.raises(InvalidInputError, match="got grad"):
        OPS.swiglu_backward(torch.rand(8, 64), x, None, None, 1.0, 0.0, False, [True, False])
    with pytest.raises(InvalidInputError, match="got up"):
        OPS.geglu_backward(x, x, torch.rand(8, 32), "tanh", False, [True, True])


def test_backward_of_losses_and_rotations() -> None:
    x, target, rest = torch.rand(8, 64), torch.zeros(8, dtype=torch.int64), (-100, 0.0, 0.0, None, "none", None)
    backward = OPS.cross_entropy_backward
    with pytest.raises(InvalidInputError, match="got grad"):
        backward(torch.rand(7), x, None, torch.rand(8), target, *rest)
    with pytest.raises(InvalidInputError, match="got lse"):
        backward(torch.rand(8), x, None, torch.rand(4), target, *rest)
    with pytest.raises(InvalidInputError, match="got target"):
        backward(torch.rand(8), x, None, torch.rand(8), target[:4], *rest)
    q, cos = torch.rand(2, 3, 5, 8), torch.rand(5, 4)
    with pytest.raises(InvalidInputError, match="got cos"):
        OPS.rotary_embedding_backward(q, q, torch.rand(4, 4), torch.rand(4, 4), False, -2, [True, True])
    with pytest.raises(InvalidInputError, match="got sin"):
        OPS.rotary_embedding_backward(q, q, cos, torch.rand(5, 2), False, -2, [True, True])
    with pytest.raises(InvalidInputError, match="got k of shape"):
        OPS.rotary_embedding_backward(q, torch.rand(2, 3, 5, 6), cos, cos, False, -2, [True, True])


def test_a_tensor_whose_memory_was_freed() -> None:
    x, heads = torch.rand(8, 64), torch.rand(1, 8, 64)
    for tensor in (x, heads):
        tensor.untyped_storage().resize_(0)
    with pytest.raises(InvalidInputError, match="without memory"):
        fusedops.cross_entropy(x, torch.zeros(8, dtype=torch.int64))
    for q, k in ((heads, None), (torch.rand(1, 8, 64), heads)):
        with pytest.raises(InvalidInputError, match="without memory"):
            fusedops.rotary_embedding(q, k, torch.rand(8, 8), torch.rand(8, 8))
    for call in (fusedops.bias_gelu, fusedops.rms_norm, fusedops.layer_norm, fusedops.swiglu):
        with pytest.raises(InvalidInputError, match="without memory"):
            call(x)


@pytest.mark.parametrize(
    "call",
    [
        lambda: fusedops.bias_gelu(torch.rand(2, 3, dtype=torch.float64)),
        lambda: fusedops.bias_gelu(torch.rand(2, 3), torch.rand(2, 1)),
        lambda: fusedops.bias_gelu(torch.rand(2, 3), torch.rand(3).bfloat16()),
        lambda: fusedops.bias_dropout_add(torch.rand(2, 3).half(), None, torch.rand(2, 3), 0.5, seed=1),
        lambda: fusedops.scaled_masked_softmax(torch.rand(2, 3, dtype=torch.float64)),
        lambda: fusedops.rms_norm(torch.rand(2, 3), torch.rand(3, dtype=torch.float64)),
        lambda: fusedops.add_rms_norm(torch.rand(2, 3).half(), torch.rand(2, 3)),
        lambda: fusedops.add_layer_norm(torch.rand(2, 3), torch.rand(2, 3).bfloat16()),
        lambda: fusedops.layer_norm(torch.rand(2, 3, dtype=torch.float64)),
        lambda: fusedops.swiglu(torch.rand(2, 3), torch.rand(2, 3).half()),
        lambda: fusedops.geglu(torch.rand(2, 4, dtype=torch.float64)),
        lambda: fusedops.cross_entropy(torch.rand(2, 4, dtype=torch.float64), torch.tensor([0, 1])),
        lambda: fusedops.rotary_embedding(torch.rand(1, 2, 4), None, *torch.rand(2, 2, 2, dtype=torch.float64)),
    ],
    ids=[
        "float64",
        "a bias for each row",
        "two dtypes",
        "a residual of another dtype",
        "float64 scores",
        "a float64 weight",
        "a float32 residual",
        "a bfloat16 residual",
        "float64 rows",
        "gate and up of two dtypes",
        "a float64 gate",
        "float64 logits",
        "float64 cosines",
    ],
)
def test_refused(call: object) -> None:
    with pytest.raises(fusedops.NoBackendError):
        call()  # type: ignore[operator]
