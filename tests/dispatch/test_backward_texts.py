"""Every text of an error of a backward call that autograd did not make, word for word."""

from __future__ import annotations

import pytest
import torch
from error_texts import Table

from fusedops import InvalidInputError
from fusedops.compat import megatron, slapo

ONES = torch.ones
TABLE = Table(__file__)
TABLE.pin(
    "gradient",
    lambda: torch.ops.fusedops.scaled_masked_softmax_backward(ONES(2, 1), ONES(2, 4), 1.0, False),
    InvalidInputError,
    "grad of shape (2, 1)",
    "the shape of the output y, (2, 4)",
    "expand grad to that shape",
)
TABLE.pin(
    "dtype",
    lambda: torch.ops.fusedops.scaled_masked_softmax_backward(ONES(2, 4).half(), ONES(2, 4), 1.0, False),
    InvalidInputError,
    "grad of float16",
    "the dtype of the output y, float32",
    "convert grad to that dtype",
)
TABLE.pin(
    "device",
    lambda: torch.ops.fusedops.bias_gelu_backward(ONES(2, 4), ONES(2, 4), ONES(4, device="meta"), "tanh", [True] * 2),
    InvalidInputError,
    "bias on meta and grad on cpu",
    "one device",
    "move it with bias.to(grad.device)",
)
TABLE.pin(
    "scale",
    lambda: torch.ops.fusedops.scaled_masked_softmax_backward(ONES(2, 4), ONES(2, 4), float("inf"), False),
    InvalidInputError,
    "scale = inf",
    "a Python number, finite in float32",
    "pass scale as a Python number, finite in float32",
)
TABLE.pin(
    "bias",
    lambda: torch.ops.fusedops.bias_gelu_backward(ONES(2, 4), ONES(2, 4), ONES(3), "tanh", [True, True]),
    InvalidInputError,
    "bias of shape (3,)",
    "a shape that broadcasts to x (2, 4): each size, from the last, 1 or x's",
    "give bias sizes of 1 where it repeats",
)
TABLE.pin(
    "text",
    lambda: torch.ops.fusedops.bias_gelu_backward(ONES(2, 4), ONES(2, 4), None, "erf", [True, False]),
    InvalidInputError,
    "approximate = 'erf'",
    "'tanh' or 'none'",
    "pass approximate as 'tanh' or 'none'",
)
TABLE.pin(
    "needs",
    lambda: torch.ops.fusedops.bias_gelu_backward(ONES(2, 4), ONES(2, 4), None, "tanh", [True]),
    InvalidInputError,
    "needs of 1 values",
    "one for each of x, bias",
    "pass that many",
)
TABLE.pin(
    "seed",
    lambda: torch.ops.fusedops.bias_dropout_backward(ONES(2, 4), None, None, 0.5, True, torch.float32, [True, False]),
    InvalidInputError,
    "seed = None",
    "the seed of forward",
    "pass that seed",
)
TABLE.pin(
    "megatron",
    lambda: megatron.bias_gelu_back(torch.tensor(1.0), ONES(4), ONES(2, 4)),
    InvalidInputError,
    "grad of shape ()",
    "the shape of the output y, (2, 4)",
    "expand grad to that shape",
)
TABLE.pin(
    "slapo",
    lambda: slapo.BiasGeLUFunction.bias_gelu_back(ONES(4), ONES(4), ONES(2, 4)),
    InvalidInputError,
    "grad of shape (4,)",
    "the shape of the output y, (2, 4)",
    "expand grad to that shape",
)
TABLE.pin(
    "layout",
    lambda: torch.ops.fusedops.bias_gelu_backward(ONES(2, 4).to_sparse(), ONES(2, 4), None, "tanh", [True, False]),
    InvalidInputError,
    "got grad of layout torch.sparse_coo",
    "expected a strided tensor",
    "to_dense()",
)


@pytest.mark.parametrize("name", TABLE.pins)
def test_a_text(name: str) -> None:
    state = torch.get_rng_state()
    TABLE.check(name)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn"


def test_no_text_is_left_over() -> None:
    TABLE.check_complete()
