"""Every installed kernel, on every case of its op, in every dtype, against the op's float64 reference.

A case that another backend served is a failure, not a pass: the call is made with fallback="raise", and the kernel that
ran is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from ascend import ascend

import fusedops
from fusedops import testing
from fusedops._op import Case, Op
from fusedops._registry import registry

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BACKENDS = {"eager": "cpu", "triton": "cpu", "npu": "npu"}  # by name, the device on which this machine can run it
# the largest tensor, in elements: Triton's interpreter takes seconds for 10^5, tests of its own have the longer rows
ELEMENTS = {"eager": 2**20, "triton": 2**13, "npu": 2**17}


@contextmanager
def counted(name: str) -> Iterator[Counter[str]]:
    """Counts the calls of a backend's kernels, by op and direction."""
    calls: Counter[str] = Counter()
    record = registry.find(name)
    assert record is not None
    saved = {key: entry.call for key, entry in record.entries.items()}

    def counting(key: tuple[str, str]) -> object:
        def call(*args: object) -> object:
            calls[" ".join(key)] += 1
            return saved[key](*args)

        return call

    try:
        for key, entry in record.entries.items():
            entry.call = counting(key)
        registry._changed()  # a plan has copies of entries
        yield calls
    finally:
        for key, entry in record.entries.items():
            entry.call = saved[key]
        registry._changed()


def public(op: Op) -> Callable[..., torch.Tensor]:
    """The op's public function, taking its arguments by position."""
    return op.positional(getattr(fusedops, op.name))


def takes(op: Op, name: str, args: tuple[object, ...]) -> bool:
    record = registry.find(name)
    assert record is not None
    check = record.entries[op.name, "forward"].check
    return check is None or check(*args) is None


def kernels(name: str) -> dict[tuple[str, str], object]:
    record = registry.find(name)
    assert record is not None, f"{name} is not installed"
    return dict(record.entries)


CALLS = [
    pytest.param(op, case, name, id=f"{op.name}-{case.name}-{name}")
    for op in testing.OPS.values()
    for case in op.cases
    for name in BACKENDS
    if (op.name, "forward") in kernels(name)
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(("op", "case", "name"), CALLS)
def test_kernel_is_within_tolerance_of_float64(op: Op, case: Case, name: str, dtype: torch.dtype) -> None:
    with ascend():
        args = testing.arguments(op, testing.shrunk(case, ELEMENTS[name]), dtype, BACKENDS[name])
        if not takes(op, name, args):
            with fusedops.use(name, fallback="raise"), pytest.raises(fusedops.NoBackendError):
                public(op)(*args)
            return
        want = testing.expected(op, args)
        for parameter in want.gradients:
            args[op.parameters.index(parameter)].requires_grad_()
        before = [arg.detach().clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        with fusedops.use(name, fallback="raise"), counted(name) as calls:
            y = public(op)(*args)
            grad = want.grad.to(y.dtype).to(y.device)
            kept = grad.clone()
            y.backward(grad)
        assert calls == {f"{op.name} forward": 1, f"{op.name} backward": 1}
        assert y.dtype == dtype
        assert y.is_contiguous()
        testing.assert_within(y, want.y, op.tolerance[dtype], f"{op.name} on {name}")
        for parameter, gradient in want.gradients.items():
            got = args[op.parameters.index(parameter)].grad
            testing.assert_within(got, gradient, op.gradient_tolerance[dtype], f"gradient of {parameter} on {name}")
        assert torch.equal(grad.cpu(), kept.cpu()), "the kernel wrote into grad_output"
        for parameter, now, then in zip(op.parameters, args, before):
            if isinstance(now, torch.Tensor):
                assert torch.equal(now.detach().cpu(), then.cpu()), f"the kernel wrote into {parameter}"


def test_the_count_sees_a_case_that_another_backend_serves() -> None:
    op = testing.OPS["scaled_masked_softmax"]
    with counted("triton") as calls:
        fusedops.scaled_masked_softmax(torch.randn(4, 4), backend="eager")
    assert not calls
    assert op.name == "scaled_masked_softmax"
