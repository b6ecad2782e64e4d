"""The comparison of a call's results with float64.

Every element must agree with float64, or with the formula in the call's own dtypes, within the limit by the op's error
model. The formula of a gradient starts from the outputs that the kernel gave. With special or large numbers the two
answers may disagree, where the result depends on rounding. Such elements are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.kernel import Kernel
from fusedops._contract.op import Op
from fusedops._plugins.registry import registry
from fusedops._verify.compare import ratios, with_choice
from fusedops.dtypes import CODES
from fusedops.testing import assert_within, expected

_ORDINARY = 64.0  # magnitudes above are special numbers


@dataclass(frozen=True)
class Answer:
    """A call and what it gave.

    Attributes:
        op: the op.
        args: every argument, in the op's order, complete.
        grads: the gradients of the outputs; empty where no gradient is wanted.
        outputs: the outputs.
    """

    op: Any
    args: tuple[Any, ...]
    grads: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def compare(answer: Answer, gradients: Mapping[str, Tensor], decision: Any) -> tuple[int, tuple[str, ...]]:
    """Assert that outputs and gradients are right.

    Args:
        answer: the call and its outputs.
        gradients: by the first parameter of each leaf: the sum over the parameters that it is given for.
        decision: names the backends that served.

    Returns:
        The number of elements that depend on rounding, and the results that a deviation of the backend excuses.
    """
    op = answer.op
    args = tuple(arg.detach().cpu() if isinstance(arg, Tensor) else arg for arg in answer.args)
    args = with_choice(op, args, answer.outputs)
    grads, count = tuple(grad.cpu() for grad in answer.grads), len(op.with_gradient)
    every = grads or [torch.zeros_like(y, device="cpu") for y in answer.outputs[:count]]
    served = {"forward": decision.backend, "backward": decision.backward}
    kernels = [
        each for side, backend in served.items() for each in _kernels(backend, op.name) if each.direction == side
    ]
    want = expected(op, args, grad=every, kernels=kernels)
    exact = _ordinary(args)
    with torch.no_grad():
        near = op.as_tuple(op.reference(*args))
    if grads:  # an output that the public function does not return has no gradient
        grads = (*grads, *(torch.zeros_like(y) for y in near[len(grads) : count]))
    rows: list[tuple[str, str, Tensor, Tensor, Tensor, Tensor]] = []
    for name, y, wide, narrow in zip(op.outputs, answer.outputs, want.outputs, near):
        what = f"output {name}"
        each = [value.float() if value.dtype in CODES else value for value in (y, wide, narrow)]  # to compare codes
        rows.append((decision.backend, what, each[0], each[1], each[2], want.limits[what]))
    if gradients:
        outputs = (*(y.cpu() for y in answer.outputs), *near[len(answer.outputs) :])
        narrow_gradients = _closed_form(op, args, outputs, grads)
        ids = {name: id(arg) for name, arg in zip(op.parameters, answer.args)}
        for name, gradient in gradients.items():
            shared = [other for other in want.gradients if ids[other] == ids[name]]
            wide, narrow, limit = (
                torch.stack([each[key].double() for key in keys]).sum(0)
                for each, keys in (
                    (want.gradients, shared),
                    (narrow_gradients, shared),
                    (want.limits, [f"gradient of {other}" for other in shared]),
                )
            )
            rows.append((decision.backward, f"gradient of {name}", gradient, wide, narrow, limit))
    undetermined, excused = 0, list[str]()
    for backend, what, got, wide, narrow, limit in rows:
        try:
            undetermined += _within(got, wide, narrow, limit, what, exact)
        except AssertionError:
            if exact or not deviates(backend, op.name):
                raise
            excused.append(what)
    return undetermined, tuple(excused)


def _ordinary(args: Sequence[Any]) -> bool:
    floating = [arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point() and arg.dtype not in CODES]
    finite = all(bool((arg.abs() <= _ORDINARY).all()) for arg in floating)
    numbers = [abs(float(arg)) for arg in args if isinstance(arg, (int, float))]
    return finite and len({arg.dtype for arg in floating}) == 1 and all(n == 0 or 1e-6 < n < 1e3 for n in numbers)


def _closed_form(
    op: Op, args: tuple[Any, ...], outputs: tuple[Tensor, ...], grads: tuple[Tensor, ...]
) -> dict[str, Tensor]:
    """Return the gradients by the op's own backward, in the call's dtypes, from the kernel's outputs."""
    with torch.no_grad():
        saved = op.saved_references(args, outputs)
        needs = tuple(args[op.parameters.index(name)] is not None for name in op.differentiable)
        results = op.backward(*op.backward_arguments(grads, (*outputs, *saved), args, needs))
    each = (results,) if isinstance(results, Tensor) else tuple(results)
    found = {name: result for name, result in zip(op.differentiable, each) if result is not None}
    if op.passed_through and args[op.parameters.index(op.passed_through)] is not None:
        found[op.passed_through] = grads[0].to(args[op.parameters.index(op.passed_through)].dtype)
    return found


def _within(got: Tensor, wide: Tensor, narrow: Tensor, limit: Tensor, what: str, exact: bool) -> int:
    """Assert that a result agrees with an answer, and return the number of elements where the answers disagree.

    Unless ``exact``, such elements may have any number.
    """
    if got.shape != wide.shape:
        assert_within(got, wide, limit, what)
        return 0
    right = (ratios(got, wide, limit) <= 1) | (ratios(got, narrow, limit) <= 1)
    # a kernel may give the limit where the formula is NaN, as a derivative is at infinity: inf * 0
    unknown = (ratios(narrow, wide, limit) > 1) | wide.isnan()
    if got.dtype == torch.float64:  # it has no wider dtype: where it overflows, another order of products may not
        unknown |= wide.isinf()
    unsure = torch.zeros_like(right) if exact else ~right & unknown
    assert_within(torch.where(right | unsure, wide.to(got.dtype), got.detach().cpu()), wide, limit, what)
    return int(unsure.sum())


def deviates(backend: str, op: str) -> bool:
    """Return True where the backend declares a deviation for an op."""
    return any(kernel.deviations for kernel in _kernels(backend, op))


def _kernels(backend: str, op: str) -> list[Kernel]:
    """Return the kernels of a backend for an op."""
    record = registry.find(backend)
    return [each.kernel for each in record.kernels if each.kernel.op == op] if record else []
