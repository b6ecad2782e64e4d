"""The float64 answer for a call, and the comparison within a tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Tolerance


@dataclass(frozen=True)
class Expected:
    """The float64 answer for a call, on the CPU.

    Attributes:
        outputs: the outputs.
        grads: the gradients of the outputs that were used.
        gradients: the gradients by parameter name.
        saved: the saved values by name. Computed in float64 where their references are.

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

    @property
    def y(self) -> Tensor:
        """The first output."""
        return self.outputs[0]

    @property
    def grad(self) -> Tensor:
        """The gradient of the first output."""
        return self.grads[0]


def expected(op: Op, args: Sequence[Any], seed: int = 1, grad: Tensor | Sequence[Tensor] | None = None) -> Expected:
    """Compute the answer of a call, its gradients and its saved values in float64 on the CPU, by the op's references.

    Args:
        op: the op.
        args: every argument, in the op's order.
        seed: of the gradients of the outputs, where ``grad`` is None: random, rounded to the outputs' dtypes.
        grad: the gradient of the output, or one for each output.

    >>> import torch
    >>> from fusedops import testing
    >>> want = testing.expected(testing.OPS["bias_gelu"], (torch.zeros(2), None, "tanh"), grad=torch.ones(2))
    >>> want.gradients["x"]
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    wanted = (*op.differentiable, *([op.passed_through] if op.passed_through else []))
    wide: list[Any] = []
    for name, arg in zip(op.parameters, args):
        if isinstance(arg, Tensor):
            arg = arg.detach().cpu()
            if arg.is_floating_point():
                arg = arg.double().requires_grad_(name in wanted)
        wide.append(arg)
    with torch.enable_grad():
        outputs = op.each(op.reference(*wide))
    if grad is None:
        generator = torch.Generator().manual_seed(seed)
        random = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in outputs]
        # a backend gets them rounded to its dtypes, and only the kernel is to be compared
        rounded = [value.to(like.dtype) for value, like in zip(random, empty_outputs(op, args))]
    else:
        rounded = [grad] if isinstance(grad, Tensor) else [*grad]
    grads = tuple(each.detach().cpu().double() for each in rounded)
    inputs = {name: value for name, value in zip(op.parameters, wide) if name in wanted and value is not None}
    with_graph = [(y, each) for y, each in zip(outputs, grads) if y.requires_grad]
    gradients = torch.autograd.grad(
        [y for y, _ in with_graph], [*inputs.values()], [each for _, each in with_graph], materialize_grads=True
    )
    with torch.no_grad():
        saved = op.saved_references(wide, outputs)
    return Expected(
        tuple(y.detach() for y in outputs),
        grads,
        dict(zip(inputs, gradients)),
        {declared.name: value.detach() for declared, value in zip(op.saved, saved)},
    )


def empty_outputs(op: Op, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return tensors without memory of the outputs' shapes and dtypes. Specs among the arguments are accepted."""
    return op.each(op.empty(*(on_meta(arg) for arg in args)))


def on_meta(arg: Any) -> Any:
    """Return a tensor or a spec as a tensor without memory, anything else as it is."""
    if hasattr(arg, "shape") and hasattr(arg, "dtype"):
        return torch.empty(tuple(arg.shape), dtype=arg.dtype, device="meta")
    return arg


def assert_within(got: Tensor, want: Tensor, allowed: Tolerance, what: str) -> None:
    """Assert ``|got - want| <= absolute + relative * |want|``; NaN equals NaN.

    Args:
        got: the result.
        want: what it must be, usually in float64.
        allowed: the tolerance.
        what: names the result, for the message.

    Raises:
        AssertionError: the shapes differ, or elements are beyond the tolerance: their number, and the worst of them.

    >>> import torch, fusedops
    >>> from fusedops import testing
    >>> testing.assert_within(torch.ones(2), torch.ones(2).double(), fusedops.Tolerance(0.0, 1e-6), "the output")
    """
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    if got.shape != want.shape:
        raise AssertionError(f"got {what} of shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    beyond = ~torch.isclose(got, want, rtol=allowed.relative, atol=allowed.absolute, equal_nan=True)
    count = int(beyond.sum())
    if count:
        distance = (got - want).abs().nan_to_num(nan=float("inf")).where(beyond, -1.0)
        at = tuple(int(i) for i in torch.unravel_index(distance.argmax(), distance.shape))
        raise AssertionError(
            f"got {what} beyond the tolerance in {count} of {beyond.numel()} elements; the worst, at {at}, is "
            f"{float(got[at]):.9g}, expected {float(want[at]):.9g} within {allowed.absolute:g} + {allowed.relative:g} "
            f"of it"
        )
