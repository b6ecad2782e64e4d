"""verify finds wrong kernels, forward and backward, by every path."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import every_op, inputs, outputs, public, requiring_a_gradient
from torch import Tensor
from verify_cases import OP, X, softmax, wrong

import fusedops
from fusedops import FusedOpsWarning, MismatchError

WAYS: dict[str, Callable[..., Tensor]] = {
    "called": softmax,
    "torch.ops": lambda x: torch.ops.fusedops.scaled_masked_softmax(x),
    "compiled": lambda x: torch.compile(softmax, backend="aot_eager", fullgraph=True)(x),
    "bound inside": lambda x: fusedops.bind(OP.name, x)(x),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_output_raises_from_its_call(way: str, bad: Any) -> None:
    bad(wrong)
    with fusedops.verify("eager") as report, pytest.raises(MismatchError) as error:
        WAYS[way](X)
    mismatch = error.value.mismatch
    assert report.worst is mismatch
    assert (mismatch.op, mismatch.direction, mismatch.backend, mismatch.against) == (OP.name, "forward", "bad", "eager")
    assert mismatch.result == "output y"
    assert mismatch.arguments[0] is X or torch.equal(mismatch.arguments[0], X)
    assert mismatch.ratio > 1000
    softmax(X)  # outside nothing is compared


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_gradient_raises_from_backward(way: str, bad: Any) -> None:
    bad(None, wrong)
    grown = X.clone().requires_grad_()
    with fusedops.verify("eager"):
        y = WAYS[way](grown)
        with pytest.raises(
            MismatchError, match="got the gradient of x of scaled_masked_softmax by bad different from eager's"
        ):
            y.sum().backward()


def test_backward_after_the_block_is_compared(bad: Any) -> None:
    bad(None, wrong)
    with fusedops.verify() as report:
        y = softmax(X.clone().requires_grad_())
    with pytest.raises(MismatchError):
        y.sum().backward()
    assert report.mismatches == 1


def test_the_error_states_got_expected_the_fix_and_how_to_reproduce(bad: Any) -> None:
    bad(wrong)
    mask = torch.zeros(4, 8, dtype=torch.bool)
    with fusedops.verify(), pytest.raises(MismatchError) as error:
        softmax(X, mask, 0.5, causal=True)
    text = str(error.value)
    want = OP.reference(X, mask, 0.5, True)
    assert text.startswith(
        "verify: got the output y of scaled_masked_softmax by bad different from eager's (element (0, 0, 0, 5) is "
        "0.25, eager's 0, 1.06e+37 times the tolerance), expected it within the op's tolerance; to fix: correct the "
        "kernel at "
    ), text
    assert "prefer another backend. Given x float32[2, 3, 4, 8] on cpu, mask bool[4, 8] on cpu, scale 0.5, " in text
    assert want[0, 0, 0, 5] == 0
    line = error.value.mismatch.reproduce
    assert text.endswith(f"The call's own arguments are in .mismatch.arguments; with random ones: {line}")
    assert line == (
        "with fusedops.verify(against='eager'): torch.manual_seed(0); torch.ops.fusedops.scaled_masked_softmax("
        "torch.randn((2, 3, 4, 8), dtype=torch.float32), torch.rand((4, 8)) < 0.35, 0.5, True, backend='bad')"
    )
    again = pickle.loads(pickle.dumps(error.value))
    assert str(again) == text
    assert torch.equal(again.mismatch.arguments[0], X)


@every_op
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_line_reproduces_for_every_op(op: str, direction: str, bad: Any) -> None:
    def change(found: Any) -> Any:
        return (wrong(found[0]), *found[1:]) if isinstance(found, tuple) else wrong(found)

    bad(*((change, None) if direction == "forward" else (None, change)), op)
    tensors = requiring_a_gradient(op, inputs(op, dtype=torch.float32))
    with (
        pytest.warns(FusedOpsWarning, match="results beyond the tolerance"),
        fusedops.verify(raise_on_mismatch=False) as report,
    ):
        sum(y.sum() for y in outputs(public(op)(*tensors))).backward()
    assert report.worst is not None
    line = report.worst.reproduce
    with pytest.raises(MismatchError) as error:
        exec(line, {"torch": torch, "fusedops": fusedops})
    assert error.value.mismatch.given == report.worst.given
    assert error.value.mismatch.direction == direction


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda y: y[..., :-1], "of shape (2, 3, 4, 7), expected (2, 3, 4, 8)"),
        (lambda y: y.double(), "of dtype float64, expected float32"),
        (lambda y: y.masked_fill(y == y.max(), float("nan")), "is nan, eager's 0."),
        (lambda y: y.masked_fill(y == y.max(), float("inf")), "is inf, eager's 0."),
    ],
    ids=["shape", "dtype", "nan", "inf"],
)
def test_a_difference_that_is_not_one_of_size(change: Any, difference: str, bad: Any) -> None:
    bad(change)
    with fusedops.verify(), pytest.raises(MismatchError) as error:
        softmax(X)
    assert difference in error.value.mismatch.difference
    assert error.value.mismatch.ratio == float("inf")


def test_a_gradient_that_is_not_given_is_found(bad: Any) -> None:
    bad(None, lambda found: (found[0], None), "bias_gelu")
    x, bias = inputs("bias_gelu", dtype=torch.float32)
    with fusedops.verify(), pytest.raises(MismatchError, match="the gradient of bias of bias_gelu by bad"):
        fusedops.bias_gelu(x, bias.requires_grad_()).sum().backward()


def test_without_raising_the_block_ends_with_one_warning(bad: Any) -> None:
    bad(wrong)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with fusedops.verify(raise_on_mismatch=False) as report:
            for _ in range(3):
                got = softmax(X)
            softmax(X[:1])
            softmax(X, backend="eager")
    assert got.view(-1)[5] > 0.25, "the user gets what the backend gave"
    (warning,) = caught
    assert str(warning.message).startswith(
        "got 4 results beyond the tolerance; verify: got the output y of scaled_masked_softmax by bad"
    )
    assert warning.filename == __file__
    assert json.loads(json.dumps(report.to_dict()))["rows"] == [
        {**vars(row), "worst": pytest.approx(row.worst)} for row in report.rows
    ]
    assert [(row.given.partition(" on ")[0], row.count, row.mismatches) for row in report.rows] == [
        ("x float32[1, 3, 4, 8]", 1, 1),
        ("x float32[2, 3, 4, 8]", 3, 3),
    ]
    lines = str(report).splitlines()
    assert lines[:3] == [
        "verify against eager: 4 results compared, 4 beyond the tolerance",
        "scaled_masked_softmax by bad",
        f"  output y: 1 compared, at most {report.rows[0].worst:.3g} of the tolerance, 1 beyond",
    ]
    assert "not compared: 1, served by eager itself" in lines
    assert lines[-1].strip().startswith("with fusedops.verify(against='eager'):")


def test_an_error_inside_the_block_is_not_hidden_by_the_warning(bad: Any) -> None:
    bad(wrong)
    with pytest.raises(ArithmeticError), fusedops.verify(raise_on_mismatch=False) as report:  # noqa: PT012
        softmax(X)
        raise ArithmeticError
    assert report.mismatches == 1
