"""The float64 answer for a call, and the comparison within a tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.evidence import Tolerance
from fusedops._contract.kernel import Kernel
from fusedops._contract.op import Op
from fusedops._contract.signature import with_floats
from fusedops._report.direction import Direction
from fusedops._verify.compare import difference, limits, within
from fusedops.dtypes import STORAGE
from fusedops.testing._empty import empty_outputs, empty_saved


class _Limits(Mapping[str, Tensor]):
    """The limits of results by name. Those of a direction are computed when the first of them is read.

    Args:
        forward: computes those of the outputs and the saved values.
        backward: computes those of the gradients.
    """

    def __init__(
        self, forward: Callable[[], Mapping[str, Tensor]], backward: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        self._make: dict[Direction, Callable[[], Mapping[str, Tensor]]] = {"forward": forward, "backward": backward}
        self._made: dict[Direction, Mapping[str, Tensor]] = {}

    def _of(self, direction: Direction) -> Mapping[str, Tensor]:
        if direction not in self._made:
            with torch.no_grad():
                self._made[direction] = self._make[direction]()
        return self._made[direction]

    def __getitem__(self, name: str) -> Tensor:
        return self._of("backward" if name.startswith("gradient") else "forward")[name]

    def __iter__(self) -> Iterator[str]:
        return chain(self._of("forward"), self._of("backward"))

    def __len__(self) -> int:
        return len([*self])


@dataclass(frozen=True)
class Expected:
    """The float64 answer for a call, on the CPU.

    Attributes:
        outputs: the outputs.
        grads: the gradients of the outputs that were used.
        gradients: the gradients by parameter name.
        saved: the saved values by name. Computed in float64 where their references are.
        limits: the largest accepted difference of each element, by the op's error bound. The keys are "output y",
            "gradient of x" and "saved rstd".

    >>> import torch
    >>> from fusedops import testing
    >>> want = testing.expected(testing.OPS["bias_gelu"], (torch.zeros(2), None, "tanh"))
    >>> want.y, [*want.gradients]
    (tensor([0., 0.], dtype=torch.float64), ['x'])
    """

    outputs: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    gradients: dict[str, Tensor]
    saved: dict[str, Tensor]
    limits: Mapping[str, Tensor] = field(default_factory=lambda: {})

    @property
    def y(self) -> Tensor:
        """The first output."""
        return self.outputs[0]

    @property
    def grad(self) -> Tensor:
        """The gradient of the first output."""
        return self.grads[0]


def expected(
    op: Op,
    args: Sequence[Any],
    seed: int = 1,
    grad: Tensor | Sequence[Tensor] | None = None,
    kernels: Sequence[Kernel] = (),
) -> Expected:
    """Compute the answer of a call, its gradients and its saved values in float64 on the CPU, by the op's references.

    Args:
        op: the op.
        args: every argument, in the op's order.
        seed: of the gradients of the outputs, where ``grad`` is None: random, rounded to the outputs' dtypes.
        grad: the gradient of the output, or one for each output; 0 for those that are not given.
        kernels: of the op, whose own errors the limits have too, see ``extra_error`` of :func:`fusedops.kernel`.

    >>> import torch
    >>> from fusedops import testing
    >>> want = testing.expected(testing.OPS["bias_gelu"], (torch.zeros(2), None, "tanh"), grad=torch.ones(2))
    >>> want.gradients["x"]
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    args = with_floats(tuple(args), op.float_indices)
    wanted = (*op.differentiable, *([op.passed_through] if op.passed_through else []))
    wide = _wide(op, args, wanted)
    with torch.enable_grad():
        outputs = op.as_tuple(op.reference(*wide))
    if grad is None:
        rounded = random_gradients(op, args, outputs, seed)
    else:
        rounded = [grad] if isinstance(grad, Tensor) else [*grad]
    grads = tuple(each.detach().cpu().double() for each in rounded)
    grads = (*grads, *(torch.zeros_like(y.detach()) for y in outputs[len(grads) : len(op.with_gradient)]))
    inputs = {
        name: value
        for name, value in zip(op.parameters, wide)
        if name in wanted and getattr(value, "requires_grad", False)
    }
    with_graph = [(y, each) for y, each in zip(outputs, grads) if y.requires_grad]
    ys, of_ys = [y for y, _ in with_graph], [each for _, each in with_graph]
    gradients = torch.autograd.grad(ys, [*inputs.values()], of_ys, materialize_grads=True) if inputs else ()
    with torch.no_grad():
        saved = op.saved_references(wide, outputs)
        results = tuple(y.detach() for y in outputs)
        values = {declared.name: value.detach() for declared, value in zip(op.saved, saved)}
        named = dict(zip(inputs, gradients))
        copies = _copies(args)
        forward = partial(_forward_limits, op, copies, results, values, kernels)
        backward = partial(_backward_limits, op, copies, results, grads, named, values, kernels)
        return Expected(results, grads, named, values, _Limits(forward, backward))


def expected_forward(op: Op, args: Sequence[Any], kernels: Sequence[Kernel] = ()) -> Expected:
    """Compute the outputs and saved values of a call as :func:`expected`, without the gradients."""
    args = with_floats(tuple(args), op.float_indices)
    wide = _wide(op, args)
    with torch.no_grad():
        outputs = op.as_tuple(op.reference(*wide))
        values = {declared.name: value for declared, value in zip(op.saved, op.saved_references(wide, outputs))}
        make = partial(_forward_limits, op, _copies(args), outputs, values, kernels)
        return Expected(outputs, (), {}, values, _Limits(make, dict))


def random_gradients(op: Op, args: Sequence[Any], outputs: Sequence[Tensor], seed: int = 1) -> list[Tensor]:
    """Return the gradients of the outputs that :func:`expected` uses.

    A backend gets them rounded to its dtypes, and only the kernel is to be compared.
    """
    generator = torch.Generator().manual_seed(seed)
    random = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in outputs[: len(op.with_gradient)]]
    return [value.to(like.dtype) for value, like in zip(random, empty_outputs(op, args))]


def wide_outputs(op: Op, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Compute the outputs of a call in float64 on the CPU."""
    with torch.no_grad():
        return op.as_tuple(op.reference(*_wide(op, with_floats(tuple(args), op.float_indices))))


def _copies(args: Sequence[Any]) -> list[Any]:
    """Return copies of the arguments on the CPU: a kernel may write its own before the limits are computed."""
    return [arg.detach().to("cpu", copy=True) if isinstance(arg, Tensor) else arg for arg in args]


def _wide(op: Op, args: Sequence[Any], wanted: Sequence[str] = ()) -> list[Any]:
    """Return the arguments in float64 on the CPU; those with gradients that are wanted require them."""
    wide: list[Any] = []
    for name, arg in zip(op.parameters, args):
        if isinstance(arg, Tensor):
            arg = arg.detach().cpu()
            if arg.dtype in STORAGE:  # codes of 8 bits stay what they are
                arg = arg.double().requires_grad_(name in wanted)
        wide.append(arg)
    return wide


def _forward_limits(
    op: Op,
    args: Sequence[Any],
    outputs: Sequence[Tensor],
    saved: Mapping[str, Tensor],
    kernels: Sequence[Kernel],
) -> dict[str, Tensor]:
    """Return the largest accepted difference of each output and saved value."""
    likes = [*empty_outputs(op, args), *empty_saved(op, args)]
    forward_args = (*args, True) if op.saved else args
    own = [each for each in kernels if each.direction == "forward"]
    accepted = limits(op, "forward", forward_args, [*outputs, *saved.values()], [like.dtype for like in likes], own)
    names = [*(f"output {name}" for name in op.outputs), *(f"saved {name}" for name in saved)]
    return {name: limit for name, limit in zip(names, accepted) if limit is not None}


def _backward_limits(
    op: Op,
    args: Sequence[Any],
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    gradients: Mapping[str, Tensor],
    saved: Mapping[str, Tensor],
    kernels: Sequence[Kernel],
) -> dict[str, Tensor]:
    """Return the largest accepted difference of each gradient. Backward is called with what forward rounds."""
    empty = empty_outputs(op, args)
    results, likes = [*outputs, *saved.values()], [*empty, *empty_saved(op, args)]
    rounded = [value.to(like.dtype) for value, like in zip(results, likes)]
    rounded_grads = [grad.to(like.dtype) for grad, like in zip(grads, empty)]
    needs = tuple(name in gradients for name in op.differentiable)
    backward_args = op.backward_arguments(rounded_grads, rounded, args, needs)
    dtypes = [getattr(arg, "dtype", None) for name in op.differentiable for arg in [args[op.parameters.index(name)]]]
    own = [each for each in kernels if each.direction == "backward"]
    backward = limits(op, "backward", backward_args, [gradients.get(name) for name in op.differentiable], dtypes, own)
    names = [f"gradient of {name}" for name in op.differentiable]
    known = {name: limit for name, limit in zip(names, backward) if limit is not None}
    passed = op.passed_through
    if passed is not None and passed in gradients:  # the output's own gradient, in its dtype
        known[f"gradient of {passed}"] = within(Tolerance(0.0, 0.0), gradients[passed], empty[0].dtype)
    return known


def assert_within(got: Tensor, want: Tensor, allowed: Tolerance | Tensor, what: str) -> None:
    """Assert that each element differs from the expected one by no more than is allowed; NaN equals NaN.

    Args:
        got: the result.
        want: what it must be, usually in float64.
        allowed: the largest difference of each element, such as one of ``Expected.limits``; or a tolerance, for
            ``absolute + relative * |want|``.
        what: names the result, for the message.

    Raises:
        AssertionError: the shapes differ, or elements are beyond what is allowed: their number, and the worst of them.

    >>> import torch, fusedops
    >>> from fusedops import testing
    >>> testing.assert_within(torch.ones(2), torch.ones(2).double(), fusedops.Tolerance(0.0, 1e-6), "the output")
    """
    if got.shape != want.shape:
        raise AssertionError(f"got {what} of shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    limit = within(allowed, want, got.dtype) if isinstance(allowed, Tolerance) else allowed
    if bool(((got.detach().cpu().double() - want.detach().cpu().double()).abs() <= limit).all()):
        return  # a fifth of the time of the differences in units of the limits; NaN and infinity need those
    worst = difference(got, want, limit)
    if worst.beyond:
        raise AssertionError(
            f"got {what} beyond the tolerance in {worst.beyond} of {got.numel()} elements; the worst, at "
            f"{worst.element}, is {worst.result:.9g}, expected {worst.expected:.9g} within {worst.limit:.3g}"
        )
