"""Calls that no autograd makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusedops import InvalidInputError

pytestmark = pytest.mark.usefixtures("on_cpu")

X, SEED, COS = torch.rand(8, 64), torch.tensor([1]), torch.rand(5, 4)
Q = torch.rand(2, 3, 5, 8)
LOSS = (torch.rand(8), X, None, torch.rand(8))
DROPOUTS = ("bias_dropout", "bias_dropout_add")
# dispatch/test_backward_check.py has the gradients, outputs and saved values of every op; these are the other tensors
BACKWARD: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "a bias of gelu": ("bias_gelu", (X, X, torch.rand(6), "tanh", [True, True]), "bias"),
    "a weight": ("add_rms_norm", (X, X, X, torch.rand(8), X[0, :32], 0.0, torch.float32, [True] * 3), "weight"),
    "up": ("geglu", (X, X, X[:, :32], "tanh", False, [True, True]), "up"),
    "a packed gate": ("swiglu", (X, X, None, None, 1.0, 0.0, False, [True, False]), "grad"),
    "targets": ("cross_entropy", (*LOSS, torch.zeros(4).long(), -100, 0.0, 0.0, None, "none", None), "target"),
    "cos": ("rotary_embedding", (Q, Q, COS[:4], COS[:4], False, -2, [True, True]), "cos"),
    "sin": ("rotary_embedding", (Q, Q, COS, COS[:, :2], False, -2, [True, True]), "sin"),
    "k": ("rotary_embedding", (Q, Q[..., :6], COS, COS, False, -2, [True, True]), "k of shape"),
    **{
        f"{what} of {op}": (op, (X, seed, bias, p, True, torch.float32, [True, bias is not None]), what.split()[-1])
        for op in DROPOUTS
        for what, seed, bias, p in (
            ("bias", SEED, torch.rand(6), 0.5),
            ("no seed", None, None, 0.5),
            ("two numbers as seed", torch.tensor([1, 2]), None, 0.5),
            ("an int32 as seed", SEED.int(), None, 0.5),
            ("p", SEED, None, 1.5),
        )
    },
}


@pytest.mark.parametrize(("op", "args", "name"), BACKWARD.values(), ids=BACKWARD)
def test_a_backward_call_with_a_tensor_of_another_form(op: str, args: tuple[Any, ...], name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"got {name}"):
        getattr(torch.ops.fusedops, f"{op}_backward")(*args)
