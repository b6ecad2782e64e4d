"""The answers that the kit keeps: by the bits of a call's arguments, and apart from what a kernel writes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedops.testing import OPS, Case, arguments
from fusedops.testing._answers import kept
from fusedops.testing._layouts import negative
from fusedops.testing._subject import Subject

X = torch.tensor([[1.0, float("nan")], [0.0, -2.0]])
SAME = {"itself": X, "a copy": X.clone(), "other strides": X.mT.contiguous().mT, "a negative view": negative(X)}
OTHER = {
    "-0": torch.tensor([[1.0, float("nan")], [-0.0, -2.0]]),
    "another shape": X.view(4),
    "another dtype": X.view(torch.int32),
    "another NaN": (X.view(torch.int32) + torch.tensor([[0, 1], [0, 0]], dtype=torch.int32)).view(torch.float32),
}


def made_again(*calls: tuple[Any, ...], op: str = "rms_norm") -> int:
    """Return how often the answer of these calls is made."""
    made: list[Tensor] = []

    def make() -> Tensor:
        made.append(torch.zeros(2))
        return made[-1]

    def tensors_of(answer: Tensor) -> Iterable[Tensor]:
        return (answer,)

    kept(OPS["bias_gelu"], "test", (), make, tensors_of)  # drops what is kept
    made.clear()
    for call in calls:
        kept(OPS[op], "test", call, make, tensors_of)
    return len(made)


@pytest.mark.parametrize("name", SAME)
def test_the_same_bits_have_the_same_answer(name: str) -> None:
    assert made_again((X, 1.0), (SAME[name], 1.0)) == 1


@pytest.mark.parametrize("name", OTHER)
def test_other_bits_have_another_answer(name: str) -> None:
    assert made_again((X, 1.0), (OTHER[name], 1.0)) == 2


def test_numbers_of_another_type_or_sign_have_another_answer() -> None:
    assert made_again(*((X, number) for number in (1, 1.0, True, 0.0, -0.0, None, "1"))) == 7


def test_another_default_dtype_or_inference_mode_has_another_answer() -> None:
    make = kept(OPS["bias_gelu"], "state", (X,), object, lambda answer: ())
    with torch.inference_mode():
        assert kept(OPS["bias_gelu"], "state", (X,), object, lambda answer: ()) is not make
    assert kept(OPS["bias_gelu"], "state", (X,), object, lambda answer: ()) is make


@pytest.mark.parametrize("op", OPS)
def test_what_a_kernel_writes_or_frees_is_of_its_call_alone(op: str) -> None:
    subject = Subject("eager", OPS[op], "cpu", 2**8)
    args = arguments(OPS[op], Case("", OPS[op].evidence.sample(2, 32)), torch.float32)
    first = subject.inputs(args)
    copies = [[each.clone() for each in part] for part in first]
    for each in (each for part in first for each in part):
        each.zero_()
        each.untyped_storage().resize_(0)
    for part, before in zip(subject.inputs(args), copies):
        for each, copy in zip(part, before):
            assert torch.equal(each, copy)


def test_what_backward_gets_depends_on_the_bits_and_not_on_the_layout() -> None:
    """Torch adds up the mean of another layout in another order: what the kit keeps must be the same for both."""
    subject = Subject("eager", OPS["add_layer_norm"], "cpu", 2**8)
    args = arguments(OPS["add_layer_norm"], Case("", OPS["add_layer_norm"].evidence.sample(8, 33)), torch.float32)
    layouts = [args, [arg.mT.contiguous().mT if isinstance(arg, Tensor) and arg.dim() > 1 else arg for arg in args]]
    first, other = (chain.from_iterable(subject._inputs(each)) for each in layouts)
    assert all(map(torch.equal, first, other))
