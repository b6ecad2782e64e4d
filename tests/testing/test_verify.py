"""verify passes correct kernels, and changes nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ascend import ascend
from calls import every_op, inputs, loss, on_backends, outputs, public, shapes
from state import active_plans, kernel_entry
from torch import Tensor
from verify_cases import OP, X, softmax, wrong

import fusedops
from fusedops import MismatchError
from fusedops.testing import OPS


@on_backends("triton")
@pytest.mark.parametrize(("against", "dtype"), [("reference", torch.float32), ("eager", torch.bfloat16)], ids=str)
def test_a_backend_agrees(op: str, backend: str, against: str, dtype: torch.dtype) -> None:
    tensors = [t.requires_grad_(t.is_floating_point()) for t in inputs(op, dtype=dtype)]
    with fusedops.use(backend, fallback="raise"), fusedops.verify(against) as report:
        loss(public(op)(*tensors)).backward()
    contract = OPS[op]
    given = [name for name in contract.differentiable if name in shapes(op)]  # no factors of LoRA
    results = {f"gradient of {name}" for name in given} | {f"output {y}" for y in contract.outputs}
    required = {f"saved {value.name}" for value in contract.saved if not value.optional}
    optional = {f"saved {value.name}" for value in contract.saved if value.optional}
    twice = {f"gradient of {contract.addend}"}  # autograd gets the first gradient again
    assert (results - twice) | required <= {row.result for row in report.rows} <= results | required | optional
    assert all(0 <= row.worst <= 1 and row.count == 1 for row in report.rows), str(report)
    assert report.worst is None


@every_op
def test_eager_agrees_with_the_reference_on_large_numbers_and_with_a_loss_scale(op: str) -> None:
    tensors = [t.mul(100).requires_grad_() if t.is_floating_point() else t for t in inputs(op, 64, torch.float32)]
    with fusedops.verify("reference") as report:
        for scale in (2**16, 2**-16):
            (sum(y.sum() for y in outputs(public(op)(*tensors))) * scale).backward()
    assert report.mismatches == 0
    contract = OPS[op]
    results = len(contract.outputs) + len(contract.saved) + len(contract.differentiable)
    assert sum(row.count for row in report.rows) <= 2 * results
    assert {row.count for row in report.rows} == {2}


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
    assert [(row.backend, row.result, row.mismatches) for row in report.rows] == [
        ("npu", "gradient of x", 0),
        ("npu", "output y", 0),
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
        "short refuses: x: dim -1 a size of at most 4": 1,
        "short has no kernel for scaled_masked_softmax backward on cpu": 1,
        "short has no kernel for bias_gelu forward on cpu": 1,
        "meta tensors have no numbers": 1,
    }
    assert [row.count for row in report.rows] == [1]


# ------------------------------------------------------------------------------------------ every n-th call, and reach


@pytest.mark.parametrize(("every", "compared"), [(1, 100), (2, 50), (10, 10), (99, 2), (100, 1), (1000, 1)])
def test_the_first_of_every_n_calls_is_compared(every: int, compared: int, bad: Any) -> None:
    bad()
    with fusedops.verify(every=every) as report:
        for _ in range(100):
            softmax(X)
    assert report.rows[0].count == compared


def test_each_op_and_direction_is_counted_apart(bad: Any) -> None:
    bad()
    with fusedops.verify("reference", every=2) as report:
        for _ in range(4):
            softmax(X.clone().requires_grad_()).sum().backward()
            fusedops.bias_gelu(X)
    assert {(row.op, row.result): row.count for row in report.rows} == {
        (OP.name, "output y"): 2,
        (OP.name, "gradient of x"): 2,
        ("bias_gelu", "output y"): 2,
    }


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
        with fusedops.verify(every=2) as report:
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


def test_a_policy_taken_from_the_block_is_a_plain_value(bad: Any) -> None:
    bad(wrong)
    with fusedops.verify(), fusedops.use("bad"):
        policy = fusedops.get_policy()
    with fusedops.use(policy):
        softmax(X)  # outside the block nothing is compared
    with fusedops.verify(), fusedops.use(policy), pytest.raises(MismatchError):
        softmax(X)


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
    plan = active_plans()[OP.name, "cpu"]
    raw = kernel_entry("bad", OP.name)
    assert plan.first.call is raw.call
