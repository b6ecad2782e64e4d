"""The conformance kit, and verify over the ops' cases, on the cpu backend."""

from __future__ import annotations

import itertools

import pytest
import torch
from cpu_values import DTYPES

import fusedops
import fusedops_cpu
from fusedops import testing

SERVED = sorted({kernel.op for kernel in fusedops_cpu.fusedops_backend().kernels})
pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(autouse=True)
def one_thread(threads: None) -> None:
    """Use one thread: on a busy machine barriers between threads take ten times as long as these small sizes."""
    torch.set_num_threads(1)


@pytest.mark.parametrize("op", SERVED)
def test_the_kit_passes(op: str) -> None:
    results = [check.run() for check in testing.checks("cpu", op=op, elements=2**13)]
    assert not [str(result) for result in results if result.failures]
    assert sum(result.cases for result in results) > 100


@pytest.mark.parametrize(("op", "dtype"), list(zip(SERVED, itertools.cycle(DTYPES))))
def test_verify_finds_no_difference(op: str, dtype: torch.dtype) -> None:
    """In one dtype: the kit has run each op in all."""
    contract = testing.OPS[op]
    calls = [testing.arguments(contract, testing.shrunk(case, 2**13), dtype) for case in contract.evidence.cases]
    with fusedops.use("cpu", fallback="silent"):
        decisions = [fusedops.explain(op, **dict(zip(contract.parameters, args))) for args in calls]
    served = [args for args, decision in zip(calls, decisions) if decision.backend == "cpu"]
    assert len(served) >= len(calls) - 2  # a bias of several rows is refused
    with fusedops.verify("reference") as report:
        for args in served:
            given = dict(zip(contract.parameters, args))
            leaves = [given[name].requires_grad_() for name in contract.differentiable if given[name] is not None]
            results = contract.call_public(*args)
            outputs = results if isinstance(results, tuple) else (results,)
            torch.autograd.grad(outputs, leaves, [torch.randn_like(y) for y in outputs])
    assert not report.skipped
    assert {row.backend for row in report.rows} == {"cpu"}
    assert sum(row.count for row in report.rows) >= 2 * len(served)
