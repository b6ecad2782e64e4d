"""Every text of an error of a backward call that autograd did not make, word for word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from error_texts import Table

from fusedops import InvalidInputError
from fusedops.compat import megatron, slapo

ONES = torch.ones
X = ONES(2, 4)
TABLE = Table(__file__, "nothing_is_drawn")


def pin(name: str, op: str, *args: Any) -> None:
    """Pin the text of a backward call of a registered op."""
    TABLE.pin(name, lambda: getattr(torch.ops.fusedops, f"{op}_backward")(*args), InvalidInputError)


pin("gradient", "scaled_masked_softmax", ONES(2, 1), X, 1.0, False)
pin("dtype", "scaled_masked_softmax", X.half(), X, 1.0, False)
pin("device", "bias_gelu", X, X, ONES(4, device="meta"), "tanh", [True] * 2)
pin("scale", "scaled_masked_softmax", X, X, float("inf"), False)
pin("bias", "bias_gelu", X, X, ONES(3), "tanh", [True, True])
pin("text", "bias_gelu", X, X, None, "erf", [True, False])
pin("needs", "bias_gelu", X, X, None, "tanh", [True])
pin("seed", "bias_dropout", X, None, None, 0.5, True, torch.float32, [True, False])
TABLE.pin("megatron", lambda: megatron.bias_gelu_back(torch.tensor(1.0), ONES(4), X), InvalidInputError)
TABLE.pin("slapo", lambda: slapo.BiasGeLUFunction.bias_gelu_back(ONES(4), ONES(4), X), InvalidInputError)
pin("layout", "bias_gelu", X.to_sparse(), X, None, "tanh", [True, False])


@pytest.fixture
def nothing_is_drawn() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), state)


test_a_text, test_no_text_is_left_over = TABLE.tests()
