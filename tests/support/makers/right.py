"""One call and its gradients, compared with the op's reference in float64 by the op's error bounds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops import testing
from fusedops._verify.compare import with_choice
from fusedops._verify.result_form import is_dense


def assert_right(name: str, *args: Any, device: str = "cpu", **options: Any) -> tuple[Tensor, ...]:
    """Assert that a call by the public function, and the gradient of each input, is within the op's bounds.

    Args:
        name: the op.
        args: its arguments, on the CPU.
        device: where the call is made.
        options: more of its arguments.

    Returns:
        The outputs.
    """
    op = testing.OPS[name]
    given = dict(zip(op.parameters, op.prepared(op.bind(args, options))))
    on_cpu = tuple(value.detach().cpu() if isinstance(value, Tensor) else value for value in given.values())
    given = {key: value.detach().to(device) if isinstance(value, Tensor) else value for key, value in given.items()}
    leaves = {key: given[key].requires_grad_() for key in op.differentiable if given[key] is not None}
    results = op.as_tuple(op.call_public(*given.values()))
    want = testing.expected(op, with_choice(op, on_cpu, results))
    present = [(name, y, grad) for name, y, grad in zip(op.outputs, results, want.grads) if y is not None]
    grads = [grad.to(y.dtype).to(device) for _, y, grad in present]
    gradients = torch.autograd.grad([y for _, y, _ in present], [*leaves.values()], grads)
    every = [(name, y) for name, y in zip(op.outputs, results) if y is not None]
    for wide, (output, y) in zip(want.outputs, every):
        assert is_dense(y) if output in op.permuted else y.is_contiguous()
        testing.assert_within(y.detach(), wide, want.limits[f"output {output}"], output)
    for (key, leaf), gradient in zip(leaves.items(), gradients):
        assert gradient.dtype is leaf.dtype
        testing.assert_within(gradient, want.gradients[key], want.limits[f"gradient of {key}"], f"gradient of {key}")
    return tuple(y.detach() for _, y in every)


def both_ways(name: str, *args: Any, **options: Any) -> dict[str, Tensor]:
    """Return the outputs of a call, and its gradients for gradients of the outputs that are the same each time."""
    op = testing.OPS[name]
    given = dict(zip(op.parameters, op.prepared(op.bind(args, options))))
    leaves = {key: given[key].detach().requires_grad_() for key in op.differentiable if given[key] is not None}
    results = zip(op.outputs, op.as_tuple(op.call_public(*{**given, **leaves}.values())))
    every = {key: y for key, y in results if y is not None}
    ys = {key: y for key, y in every.items() if y.is_floating_point()}
    grads = [torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype) for y in ys.values()]
    gradients = torch.autograd.grad([*ys.values()], [*leaves.values()], grads)
    return {**{key: y.detach() for key, y in every.items()}, **dict(zip(leaves, gradients))}
