"""verify: wrong kernels are found, forward and backward, by every way; right ones are not; nothing else changes."""

from __future__ import annotations

import functools
import inspect
import json
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ascend import ascend
from calls import every_op, inputs, public
from torch import Tensor

import fusedops
from fusedops import FusedOpsWarning, InvalidInputError, MismatchError, PolicyError
from fusedops._op import OPS
from fusedops._registry import registry

OP = OPS["scaled_masked_softmax"]
softmax = fusedops.scaled_masked_softmax
X = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0))


def wrong(y: Tensor) -> Tensor:
    y = y.clone()
    y.view(-1)[5] += 0.25
    return y


@pytest.fixture
def bad(fakes: Any) -> Any:
    """A maker of a backend "bad" whose results, forward or backward, are changed by a function."""

    def make(
        forward: Callable[[Any], Any] | None = None, backward: Callable[[Any], Any] | None = None, op: str = OP.name
    ):
        contract = OPS[op]
        kernels: list[fusedops.Kernel] = []
        for direction, function, change in (
            ("forward", contract.reference, forward),
            ("backward", contract.backward, backward),
        ):
            kernels.append(fusedops.kernel(op, direction=direction)(changed(function, change)))  # type: ignore[arg-type]
        fusedops.register(fusedops.Backend("bad", ("cpu",), 50, tuple(kernels)))

    return make


def changed(function: Callable[..., Any], change: Callable[[Any], Any] | None) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        return found if change is None else change(found)

    run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return run


WAYS: dict[str, Callable[..., Tensor]] = {
    "called": softmax,
    "torch.ops": lambda x: torch.ops.fusedops.scaled_masked_softmax(x),
    "compiled": lambda x: torch.compile(softmax, backend="aot_eager", fullgraph=True)(x),
    "bound inside": lambda x: fusedops.bind(OP.name, x)(x),
}


# ------------------------------------------------------------------------------------------------ wrong ones are found


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_output_raises_from_its_call(way: str, bad: Any) -> None:
    bad(wrong)
    with fusedops.verify("eager") as report, pytest.raises(MismatchError) as error:
        WAYS[way](X)
    mismatch = error.value.mismatch
    assert report.worst is mismatch
    assert (mismatch.op, mismatch.direction, mismatch.backend, mismatch.against) == (OP.name, "forward", "bad", "eager")
    assert mismatch.what == "output"
    assert mismatch.arguments[0] is X or torch.equal(mismatch.arguments[0], X)
    assert mismatch.ratio > 1000
    softmax(X)  # outside nothing is compared


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_gradient_raises_from_backward(way: str, bad: Any) -> None:
    bad(None, wrong)
    grown = X.clone().requires_grad_()
    with fusedops.verify("eager"):
        y = WAYS[way](grown)
        with pytest.raises(MismatchError, match="the gradient of x of scaled_masked_softmax by bad differs from eager"):
            y.sum().backward()


def test_backward_after_the_block_is_compared(bad: Any) -> None:
    bad(None, wrong)
    with fusedops.verify() as report:
        y = softmax(X.clone().requires_grad_())
    with pytest.raises(MismatchError):
        y.sum().backward()
    assert report.mismatches == 1


def test_the_error_says_given_needed_do_and_how_to_reproduce(bad: Any) -> None:
    bad(wrong)
    mask = torch.zeros(4, 8, dtype=torch.bool)
    with fusedops.verify(), pytest.raises(MismatchError) as error:
        softmax(X, mask, 0.5, causal=True)
    text = str(error.value)
    want = OP.reference(X, mask, 0.5, causal=True)
    assert text.startswith(
        "verify: the output of scaled_masked_softmax by bad differs from eager's: element (0, 0, 0, 5) is 0.25, "
        "eager's 0, 6.25e+04 times what is allowed; needs to be within the op's tolerance. Given x "
        "float32[2, 3, 4, 8] on cpu, mask bool[4, 8] on cpu, scale 0.5, causal True. Mend the kernel at "
    ), text
    assert want[0, 0, 0, 5] == 0
    line = error.value.mismatch.reproduce
    assert text.endswith(f"or prefer another backend. The call's own arguments are in .mismatch.arguments; to try "
                         f"random ones: {line}")  # fmt: skip
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
    tensors = inputs(op, dtype=torch.float32)
    tensors[0].requires_grad_()
    with pytest.warns(FusedOpsWarning, match="results differ"), fusedops.verify(raise_on_mismatch=False) as report:
        public(op)(*tensors).sum().backward()
    assert report.worst is not None
    line = report.worst.reproduce
    with pytest.raises(MismatchError) as error:
        exec(line, {"torch": torch, "fusedops": fusedops})
    assert error.value.mismatch.given == report.worst.given
    assert error.value.mismatch.direction == direction


@pytest.mark.parametrize(
    ("change", "off"),
    [
        (lambda y: y[..., :-1], "its shape is (2, 3, 4, 7), and eager's (2, 3, 4, 8)"),
        (lambda y: y.double(), "its dtype is torch.float64, and eager's torch.float32"),
        (lambda y: y.masked_fill(y == y.max(), float("nan")), "is nan, eager's 0."),
        (lambda y: y.masked_fill(y == y.max(), float("inf")), "is inf, eager's 0."),
    ],
    ids=["shape", "dtype", "nan", "inf"],
)
def test_what_is_off_without_a_size(change: Any, off: str, bad: Any) -> None:
    bad(change)
    with fusedops.verify(), pytest.raises(MismatchError) as error:
        softmax(X)
    assert off in error.value.mismatch.off
    assert error.value.mismatch.ratio == float("inf")


def test_a_gradient_that_is_not_given_is_found(bad: Any) -> None:
    bad(None, lambda found: (found[0], None), "bias_gelu")
    x, bias = inputs("bias_gelu", dtype=torch.float32)
    with fusedops.verify(), pytest.raises(MismatchError, match="the gradient of bias of bias_gelu by bad"):
        fusedops.bias_gelu(x, bias.requires_grad_()).sum().backward()


def test_without_raising_the_block_ends_with_one_warning(bad: Any) -> None:
    bad(wrong)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with fusedops.verify(raise_on_mismatch=False) as report:
            for _ in range(3):
                got = softmax(X)
            softmax(X[:1])
            softmax(X, backend="eager")
    assert got.view(-1)[5] > 0.25, "the user gets what the backend gave"
    (warning,) = said
    assert str(warning.message).startswith("4 results differ; verify: the output of scaled_masked_softmax by bad")
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
        f"  output: 1 compared, at most {report.rows[0].worst:.3g} of the tolerance, 1 beyond",
    ]
    assert "not compared: 1, served by eager itself" in lines
    assert lines[-1].strip().startswith("with fusedops.verify(against='eager'):")


def test_an_error_inside_the_block_is_not_hidden_by_the_warning(bad: Any) -> None:
    bad(wrong)
    with pytest.raises(ArithmeticError), fusedops.verify(raise_on_mismatch=False) as report:  # noqa: PT012
        softmax(X)
        raise ArithmeticError
    assert report.mismatches == 1


# ------------------------------------------------------------------------------------------ right ones are not accused


@every_op
@pytest.mark.parametrize("against", ["eager", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_triton_agrees(op: str, against: str, dtype: torch.dtype) -> None:
    tensors = [t.requires_grad_(t.is_floating_point()) for t in inputs(op, dtype=dtype)]
    with fusedops.use("triton", fallback="raise"), fusedops.verify(against) as report:
        public(op)(*tensors).square().sum().backward()
    kinds = {f"gradient of {name}" for name in OPS[op].differentiable} | {"output"}
    assert {row.what for row in report.rows} == kinds
    assert all(0 <= row.worst <= 1 and row.count == 1 for row in report.rows), str(report)
    assert report.worst is None


@every_op
def test_eager_agrees_with_the_reference_on_large_numbers_and_with_a_loss_scale(op: str) -> None:
    tensors = [t.mul(100).requires_grad_() if t.is_floating_point() else t for t in inputs(op, 64, torch.float32)]
    with fusedops.verify("reference") as report:
        (public(op)(*tensors).sum() * 2**16).backward()
        (public(op)(*tensors).sum() * 2**-16).backward()
    assert report.mismatches == 0
    assert sum(row.count for row in report.rows) == 2 * (1 + len(OPS[op].differentiable))


def test_a_tiny_gradient_is_not_below_notice(bad: Any) -> None:
    bad(None, lambda dx: dx * 1.01)
    with fusedops.verify(), pytest.raises(MismatchError):
        (softmax(X.clone().requires_grad_())[..., 0].sum() * 1e-9).backward()


def test_a_sum_over_many_rows_may_be_off_by_more_than_one_over_few(bad: Any) -> None:
    bad(None, lambda found: (found[0], None if found[1] is None else found[1] + 1e-3), "bias_gelu")
    bias = torch.zeros(4, requires_grad=True)
    with fusedops.verify() as report:
        fusedops.bias_gelu(torch.randn(4096, 4), bias).sum().backward()
        assert [row.mismatches for row in report.rows] == [0, 0]
        with pytest.raises(MismatchError, match="the gradient of bias"):
            fusedops.bias_gelu(torch.randn(2, 4), bias).sum().backward()


def test_the_stand_in_device_agrees() -> None:
    with ascend():
        x = torch.randn(1, 2, 32, 64).to("npu").requires_grad_()
        with fusedops.use("npu", fallback="raise"), fusedops.verify("eager") as report:
            softmax(x, None, 0.5).sum().backward()
    assert [(row.backend, row.what, row.mismatches) for row in report.rows] == [
        ("npu", "gradient of x", 0),
        ("npu", "output", 0),
    ]


def test_empty_tensors_agree() -> None:
    with fusedops.verify("reference") as report:
        softmax(torch.ones(0, 4, requires_grad=True)).sum().backward()
    assert [row.worst for row in report.rows] == [0, 0]


# ------------------------------------------------------------------------------------------------ what is not compared


def test_calls_that_cannot_be_compared_are_counted_with_the_reason(fakes: Any) -> None:
    from fusedops.constraints import Dim

    fakes("short", Dim("x", (-1,), at_most=4), backward=None, priority=-20)
    fakes("other", backward=None)
    with fusedops.verify("short") as report, fusedops.use("other", fallback="silent"):
        softmax(X)
        softmax(X[..., :4].clone().requires_grad_()).sum().backward()
        fusedops.bias_gelu(X)
        softmax(X.to("meta"))
    assert dict(report.skipped) == {
        "short refuses: needs x: dim -1 a size of at most 4": 1,
        "short has no kernel for scaled_masked_softmax backward on cpu": 1,
        "short has no kernel for bias_gelu forward on cpu": 1,
        "meta tensors have no numbers": 1,
    }
    assert [row.count for row in report.rows] == [1]


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: fusedops.verify("eagre"), PolicyError,
         "verify: no backend is called 'eagre'; the nearest is 'eager'; known are eager, npu, reference, triton"),
        (lambda: fusedops.verify("npu"), PolicyError, "verify: backend 'npu' cannot run here: unavailable: "),
        (lambda: fusedops.verify(sample=0), InvalidInputError,
         "verify: sample is 0; needs a part of all calls in (0, 1], such as 0.1"),
        (lambda: fusedops.verify(sample=10), InvalidInputError, "verify: sample is 10; needs a part"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_said(make: Any, kind: Any, text: str, fakes: Any) -> None:
    with pytest.raises(kind) as error:
        make()
    assert str(error.value).startswith(text)


# ------------------------------------------------------------------------------------------------- sampling, and reach


@pytest.mark.parametrize(("sample", "wanted"), [(1, 100), (0.5, 50), (0.1, 10), (0.01, 1)])
def test_the_sample_is_a_part_of_the_calls(sample: float, wanted: int, bad: Any) -> None:
    bad()
    with fusedops.verify(sample=sample) as report:
        for _ in range(100):
            softmax(X)
    assert abs(report.rows[0].count - wanted) <= 1


def test_the_first_call_is_compared_and_no_period_of_layers_escapes(bad: Any) -> None:
    bad()
    with fusedops.verify(sample=0.001) as report:
        softmax(X)
    assert report.rows[0].count == 1
    with fusedops.verify(sample=0.25) as report:
        for _ in range(40):
            for layer in range(4):
                softmax(X[..., : 4 + layer])
    assert len(report.rows) == 4, "each of four layers is compared at times"


def test_torchs_generator_and_dropouts_mask_are_left_alone() -> None:
    def run() -> Tensor:
        torch.manual_seed(7)
        x = torch.ones(4, 33, requires_grad=True)
        y = fusedops.bias_dropout_add(x, None, torch.zeros(4, 33), 0.5)
        y.sum().backward()
        assert x.grad is not None
        return torch.cat([y.detach(), x.grad, torch.rand(4, 33)])

    with fusedops.use("triton"):
        alone = run()
        with fusedops.verify(sample=0.5) as report:
            watched = run()
    assert torch.equal(alone, watched)
    assert sum(row.count for row in report.rows) == 2


def test_a_policy_inside_or_around_is_verified_and_ends_with_the_block(bad: Any) -> None:
    bad(wrong)
    for around, inside in ((fusedops.verify(), fusedops.use("bad")), (fusedops.use("bad"), fusedops.verify())):
        with around, inside:
            with pytest.raises(MismatchError):
                softmax(X)
            with pytest.raises(MismatchError):
                softmax(X, backend="bad")
            fusedops.set_policy("triton")
            with pytest.raises(MismatchError):
                softmax(X)
            fusedops.set_policy(None)
        softmax(X)


def test_other_threads_are_not_verified(bad: Any) -> None:
    bad(wrong)
    done: list[Tensor] = []
    with fusedops.verify() as report:
        thread = threading.Thread(target=lambda: done.append(softmax(X)))
        thread.start()
        thread.join()
    assert len(done) == 1
    assert report.rows == []


def test_a_policy_taken_from_the_block_brings_its_verification(bad: Any) -> None:
    bad(wrong)
    with fusedops.verify():
        policy = fusedops.get_policy()
    with fusedops.use(policy), pytest.raises(MismatchError):
        softmax(X)


def test_the_comparison_is_not_counted(bad: Any) -> None:
    bad()
    fusedops.reset_stats()
    with fusedops.verify():
        softmax(X)
    assert [(c.backend, c.calls) for c in fusedops.stats().counts] == [("bad", 1)]
    fusedops.reset_stats()


def test_explain_in_the_block_compares_nothing(bad: Any) -> None:
    bad(wrong)
    with fusedops.verify() as report:
        assert fusedops.explain(OP.name, X).backend == "bad"
    assert report.rows == []


def test_no_plan_outside_knows_of_it(bad: Any) -> None:
    """Zero cost when not active: the entries that the hot path calls are the kernels' own again."""
    bad()
    with fusedops.verify():
        softmax(X)
    softmax(X)
    plan = fusedops.get_policy().plans[OP.name, "cpu"]
    record = registry.find("bad")
    assert record is not None
    raw = record.entries[OP.name, "forward"]
    assert plan.first.call is raw.call
