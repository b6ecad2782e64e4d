"""Every text of an error of a backward call that autograd did not make, word for word."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from error_texts import Table

from fusedops import InvalidInputError
from fusedops.compat import megatron, slapo

ONES = torch.ones
TABLE = Table(__file__, "nothing_is_drawn")
TABLE.pin(
    "gradient",
    lambda: torch.ops.fusedops.scaled_masked_softmax_backward(ONES(2, 1), ONES(2, 4), 1.0, False),
    InvalidInputError,
)
TABLE.pin(
    "dtype",
    lambda: torch.ops.fusedops.scaled_masked_softmax_backward(ONES(2, 4).half(), ONES(2, 4), 1.0, False),
    InvalidInputError,
)
TABLE.pin(
    "device",
    lambda: torch.ops.fusedops.bias_gelu_backward(ONES(2, 4), ONES(2, 4), ONES(4, device="meta"), "tanh", [True] * 2),
    InvalidInputError,
)
TABLE.pin(
    "scale",
    lambda: torch.ops.fusedops.scaled_masked_softmax_backward(ONES(2, 4), ONES(2, 4), float("inf"), False),
    InvalidInputError,
)
TABLE.pin(
    "bias",
    lambda: torch.ops.fusedops.bias_gelu_backward(ONES(2, 4), ONES(2, 4), ONES(3), "tanh", [True, True]),
    InvalidInputError,
)
TABLE.pin(
    "text",
    lambda: torch.ops.fusedops.bias_gelu_backward(ONES(2, 4), ONES(2, 4), None, "erf", [True, False]),
    InvalidInputError,
)
TABLE.pin(
    "needs",
    lambda: torch.ops.fusedops.bias_gelu_backward(ONES(2, 4), ONES(2, 4), None, "tanh", [True]),
    InvalidInputError,
)
TABLE.pin(
    "seed",
    lambda: torch.ops.fusedops.bias_dropout_backward(ONES(2, 4), None, None, 0.5, True, torch.float32, [True, False]),
    InvalidInputError,
)
TABLE.pin("megatron", lambda: megatron.bias_gelu_back(torch.tensor(1.0), ONES(4), ONES(2, 4)), InvalidInputError)
TABLE.pin("slapo", lambda: slapo.BiasGeLUFunction.bias_gelu_back(ONES(4), ONES(4), ONES(2, 4)), InvalidInputError)
TABLE.pin(
    "layout",
    lambda: torch.ops.fusedops.bias_gelu_backward(ONES(2, 4).to_sparse(), ONES(2, 4), None, "tanh", [True, False]),
    InvalidInputError,
)


@pytest.fixture
def nothing_is_drawn() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), state)


test_a_text, test_no_text_is_left_over = TABLE.tests()
