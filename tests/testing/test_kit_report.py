"""The report of the conformance kit: one block for each cause, cut texts, the sentence of the contract that failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from command_line import flat, run
from loopback import reference_kernels, registered

import fusedops
from fusedops import Kernel, testing
from fusedops.testing import OPS

NAMES = ("kernel", "float64", "inputs", "fake", "saved", "dtypes", "autograd", "checkpoint", "opcheck", "threads")
LAYOUT = "each result is a plain, contiguous tensor of the shape, dtype and device that the op gives it"


def reported(
    kernels: Sequence[Kernel], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[list[testing.Result], str]:
    """Return the results of some checks of a backend with these kernels, and what ``fusedops check`` prints."""
    real, results = testing.checks, []
    monkeypatch.setattr(testing, "checks", lambda *args: [check for check in real(*args) if check.name in NAMES])
    monkeypatch.setattr(testing.Check, "run", _kept(testing.Check.run, results))
    with registered(fusedops.Backend("mine", ("cpu",), -50, tuple(kernels))):
        code, output = run("check", "mine", "--elements", "2048", capsys=capsys)
    assert code == 1
    return results, output


def _kept(method: Callable[..., Any], results: list[testing.Result]) -> Callable[..., Any]:
    def run_and_keep(self: testing.Check, *args: Any) -> testing.Result:
        results.append(method(self, *args))
        return results[-1]

    return run_and_keep


def test_a_gradient_in_a_tuple_is_refused_by_the_first_check_with_the_rule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    op = OPS["scaled_masked_softmax"]
    forward, _ = reference_kernels(op)

    @fusedops.kernel(op.name, direction="backward")
    def backward(grad: Any, y: Any, scale: Any, causal: Any) -> Any:
        return (op.backward(grad, y, scale, causal),)

    results, output = reported([forward, backward], monkeypatch, capsys)
    failed = [result for result in results if result.failures]
    first = next(result for result in results if result.check.direction == "backward")
    assert failed[0] is first
    assert first.check.name == "kernel"
    (failure,) = first.failures
    assert failure.seen == ("got a tuple of 1 from the backward kernel of scaled_masked_softmax, expected a tensor")
    assert failure.contract == "an op with one gradient returns it alone, not in a tuple"
    assert {result.check.name for result in failed} >= {"autograd", "opcheck", "checkpoint", "fake"}
    assert output.count("\nfailed ") == 1, output
    count = sum(len(result.failures) for result in results)
    assert f"also {count - 1} more cases with this message: " in flat(output)


def test_one_cause_is_one_block_with_the_sentence_that_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    op = OPS["rms_norm"]
    _, backward = reference_kernels(op)

    @fusedops.kernel(op.name)
    def forward(x: Any, weight: Any, eps: Any, offset: Any, save: bool) -> Any:
        y, rstd = op.reference_with_saved(x, weight, eps, offset, save)
        return y.contiguous(), None if rstd is None else rstd[..., None]

    results, output = reported([forward, backward], monkeypatch, capsys)
    failures = [failure for result in results for failure in result.failures if result.check.direction == "forward"]
    assert len(failures) > 10
    assert {failure.contract for failure in failures} == {LAYOUT}
    assert output.count("\nfailed ") == 1, output
    assert flat(output).count("got the saved value rstd as") == 1
    assert "rms_norm/forward/fake 3" in flat(output)


def test_a_result_of_another_dtype_names_the_layout_not_the_tolerance(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    op = OPS["bias_gelu"]
    _, backward = reference_kernels(op)

    @fusedops.kernel(op.name)
    def forward(x: Any, bias: Any, approximate: Any) -> Any:
        return op.reference(x.float(), bias, approximate)

    results, _ = reported([forward, backward], monkeypatch, capsys)
    (result,) = [result for result in results if result.check.id == "bias_gelu/forward/float64"]
    assert {failure.contract for failure in result.failures} == {LAYOUT}
    assert str(result).count("contract  ") == 1
    assert f"also       {len(result.failures) - 1} more cases with this message: float64 " in str(result)


def test_the_text_of_an_exception_is_cut_and_its_traceback_is_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, backward = reference_kernels(OPS["bias_gelu"])

    @fusedops.kernel("bias_gelu")
    def raising(x: Any, bias: Any, approximate: Any) -> Any:
        raise RuntimeError("\x1b[31mno room for\n" + "\n".join(f"[{row}., 0., 0.]," for row in range(400)))

    results, output = reported([raising, backward], monkeypatch, capsys)
    failure = next(failure for result in results for failure in result.failures)
    assert len(failure.seen.splitlines()) <= 11
    assert failure.seen.startswith("raised RuntimeError: \\x1b[31mno room for\n[0., 0., 0.],")
    assert failure.seen.endswith("more lines")
    assert "[399., 0., 0.]," in failure.traceback
    assert failure.contract == "a call that the constraints accept raises nothing"
    assert len(output.splitlines()) < 80
    assert "\x1b" not in output


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        ("got y as float32 (9, 1), expected float32 (9,)", "got y as bfloat16 (2, 3, 1), expected bfloat16 (2, 3)", 1),
        ("got the worst 0.31, expected 1e-05", "got the worst nan, expected -2.5", 1),
        ("got the gradient of x beyond", "got the gradient of weight beyond", 0),
        ("got the saved value rstd", "got the saved value mean", 0),
    ],
)
def test_messages_that_differ_in_sizes_and_numbers_have_one_cause(first: str, second: str, alike: int) -> None:
    one, other = (testing.Failure("a case", seen, "a contract", "a command") for seen in (first, second))
    assert (one.cause == other.cause) == alike


def test_a_forward_that_returns_a_tuple_of_one_is_refused() -> None:
    op = OPS["bias_gelu"]

    @fusedops.kernel("bias_gelu")
    def forward(x: torch.Tensor, bias: torch.Tensor | None, approximate: str) -> Any:
        return (op.reference(x, bias, approximate),)

    with registered(fusedops.Backend("mine", ("cpu",), -50, (forward,))):
        (check,) = [check for check in testing.checks("mine") if check.id == "bias_gelu/forward/kernel"]
        (failure,) = check.run().failures
    assert failure.seen == "got a tuple of 1 from the forward kernel of bias_gelu, expected a tensor"
    assert failure.contract == "an op with one output returns it alone, not in a tuple"
