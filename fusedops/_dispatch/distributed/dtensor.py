"""The ops on DTensors: where each tensor must be placed, and each rank's local call.

Loaded once there can be a DTensor, never by ``import fusedops``. The rules are torch-dispatch rules of the registered
ops, not sharding strategies: torch takes a strategy's inputs wherever they are and gathers them without being asked,
and a strategy cannot pass a kernel the position of its part.

One rule for all ops. Every tensor broadcasts to the first one; a dim that is sharded for one of them is sharded for
all that have it. A replicated tensor is cut, which moves nothing; a partial one is summed, by a reduce-scatter where
the others are sharded. Any other placement would gather, and is refused; only backward redistributes the output's
gradient, which no caller can place. What is special about an op is its :class:`Sharding`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from fusedops._contract import values
from fusedops._contract.op import Op
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._dispatch.distributed.placement import (
    Combining,
    Layout,
    common_layout,
    dims_by_name,
    distributed,
    local_arguments,
    whole_result,
    whole_tensor,
)
from fusedops._dispatch.selection.decide import decide
from fusedops._dispatch.selection.fallback import report
from fusedops._dispatch.selection.plan import Plan
from fusedops._dispatch.serve import backward_plan, plan_for, select
from fusedops._plugins.registry import registry
from fusedops._report.reason import Reason, ReasonCode
from fusedops._torch import broadcast
from fusedops.errors import InvalidInputError, NoBackendError

_with_rules: set[str] = set()


def register_rules(name: str) -> None:
    """Register the rules of an op for DTensors, once."""
    if name in _with_rules:
        return
    _with_rules.add(name)
    op = registry.ops[name]
    torch.library.register_torch_dispatch(f"fusedops::{name}", DTensor, partial(_forward, op))
    torch.library.register_torch_dispatch(f"fusedops::{name}_backward", DTensor, partial(_backward, op))


def shared_draw(drawn: Tensor, x: Tensor) -> Tensor:
    """Return a tensor that this rank drew for a call with ``x``; for a DTensor that of its mesh's first rank."""
    if isinstance(x, DTensor) and x.device_mesh.get_coordinate() is not None:
        for dim in range(x.device_mesh.ndim):
            drawn = broadcast(drawn, 0, (x.device_mesh, dim))  # torch.compile cannot trace distribute_tensor
    return drawn


def _forward(
    op: Op, cls: type, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    args = (*args, *op.defaults[len(args) :])  # torch leaves out trailing arguments that equal the schema's default
    op.validate(args)
    if op.written:
        raise InvalidInputError(
            f"{op.name}: got a DTensor, expected plain tensors, as the call writes {', '.join(op.written)}; to fix: "
            f"call it on the part of each rank, as in {op.parameters[0]}.to_local()"
        )
    given = distributed(op, op.name, dict(zip(op.parameters, args)))
    first = op.parameters[0]
    layout = common_layout(op, op.name, given, first, op.tensors)
    local, shard = local_arguments(op, op.name, given, layout), layout.shard()
    saves = kwargs.get("save", False)
    if op.sharding.adjust is not None:
        local = op.sharding.adjust(local, shard)
    count = len(op.outputs) + (len(op.required_saved) if saves else 0)
    if (combined := _combined(op, given, layout)) is not None:
        ranks = _ranks(op.name, func, given, local, kwargs, layout, saves, count)
        if any(map(ranks.is_cut, combined.dims)) and not combined.by_kernels:
            plan = plan_for(op, local[first], kwargs.get("backend"))
            _report_composite(plan, tuple(local.values()), _with_dim(op, given, combined.dims))
        each = combined.forward(local, ranks)
    elif _needs_composite(op, local, shard):
        _report_composite(plan_for(op, local[first], kwargs.get("backend")), tuple(local.values()), first)
        assert op.sharding.forward is not None
        each = op.as_tuple(op.sharding.forward(local, shard))
    else:
        results = func(*local.values(), **kwargs)
        each = (results,) if isinstance(results, Tensor) else results[:count]
    shapes = _output_shapes(op, given)
    with_dims = dims_by_name(op, given)
    placed = [_of_output(op, layout, shape, with_dims.get(name)) for name, shape in zip(op.outputs, shapes)]
    whole = [whole_tensor(result, layout, shape, at) for result, shape, at in zip(each, shapes, placed)]
    for value, result in zip(op.required_saved, each[len(whole) :]):
        whole.append(_whole_saved(op, given, local, layout, value.gradient_of, result))
    if not saves:
        nothing = [Replicate()] * len(layout.dims)
        whole += [whole_tensor(each[0].new_empty(0), layout, (0,), nothing) for _ in op.required_saved]
    return whole[0] if len(whole) == 1 else tuple(whole)


def _of_output(
    op: Op, layout: Layout, shape: tuple[int, ...], with_dims: Sequence[int | None] | None
) -> Sequence[Placement]:
    """Return the placements of an output of this shape; ``with_dims`` as of ``Sharding.dims_of``."""
    if op.sharding.summed:
        return layout.of(shape, Partial())
    if with_dims is not None:
        return layout.of(shape, None, with_dims)
    return layout.of(shape) if len(shape) == len(layout.shape) else layout.leading(shape)


def _whole_saved(
    op: Op,
    given: Mapping[str, Any],
    local: Mapping[str, Any],
    layout: Layout,
    gradient_of: str | None,
    result: Tensor,
) -> DTensor:
    """Return a saved value: placed as the gradient that it is, or with the leading dims of the first argument."""
    if gradient_of is None or local[gradient_of] is None or result.shape != local[gradient_of].shape:
        return whole_result(result, layout.shard(), layout)
    shape = tuple(given[gradient_of].shape)
    return whole_tensor(result, layout, shape, layout.of(shape, Partial(), dims_by_name(op, given).get(gradient_of)))


def _output_shapes(op: Op, given: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Return the shapes of the outputs of the whole call."""
    args = [
        torch.empty(tuple(value.shape), dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value
        for value in given.values()
    ]
    return [tuple(like.shape) for like in op.as_tuple(op.empty(*args))]


def _backward(
    op: Op, cls: type, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    name = f"{op.name}_backward"
    given = distributed(op, name, dict(zip(op.backward_parameters, args)))
    grads = op.backward_call.grads
    kept = [n for n, value in given.items() if isinstance(value, DTensor) and n not in grads]
    saved = {value.name for value in op.saved}
    # outputs lack the last dims of the first parameter
    of_rows = op.sharding.combined is not None and not op.sharding.combined.by_kernels
    first = op.parameters[0] if of_rows else grads[0]
    order = [n for n in kept if n not in saved]
    layout = common_layout(op, name, given, first, order if of_rows else (*order, *grads))
    with_dims = dims_by_name(op, given)
    for grad in grads:
        shape, dims = given[grad].shape, with_dims.get(grad)
        placements = layout.leading(shape) if of_rows else layout.of(shape, None, dims)
        given[grad] = given[grad].redistribute(placements=placements)
    local = local_arguments(op, name, given, layout, {*saved, *grads} if of_rows else saved)
    shard = layout.shard()
    if op.sharding.adjust is not None:
        local = op.sharding.adjust(local, shard)
    computed: Any
    if (combined := _combined(op, given, layout)) is not None:
        ranks = _ranks(name, func, given, local, kwargs, layout, False, len(op.differentiable))
        if any(map(ranks.is_cut, combined.dims)) and not combined.by_kernels:
            plan = _plan_of_backward(op, local[grads[0]], kwargs)
            _report_composite(plan, tuple(local.values()), _with_dim(op, given, combined.dims))
        computed = combined.backward(local, ranks)
    elif _needs_composite(op, local, shard):
        _report_composite(_plan_of_backward(op, local[grads[0]], kwargs), tuple(local.values()), op.parameters[0])
        assert op.sharding.backward is not None
        computed = op.sharding.backward(local, shard)
    else:
        computed = func(*local.values(), **kwargs)
    if isinstance(computed, tuple):  # a torch op returns no None
        nothing, several = local[grads[0]].new_empty(0), cast("tuple[Tensor | None, ...]", computed)
        computed = tuple(nothing if gradient is None else gradient for gradient in several)
    single = len(op.differentiable) == 1
    needs = given.get("needs", [True] * len(op.differentiable))
    whole: list[DTensor] = []
    for index, gradient in enumerate((computed,) if single else computed):
        # if backward has no such parameter, use the layout of the matching output's gradient
        taken = op.differentiable[index] in given
        like = given[op.differentiable[index] if taken else grads[min(index, len(grads) - 1)]]
        if not needs[index]:
            shape, placements = tuple(gradient.shape), tuple(Replicate() for _ in layout.dims)  # an empty stand-in
        else:
            shape = tuple(like.shape)
            if not taken and op.first_in_backward is not None and op.differentiable[index] == op.parameters[0]:
                specs = {key: TensorSpec.of(arg) if isinstance(arg, Tensor) else arg for key, arg in given.items()}
                shape, taken = tuple(op.first_in_backward(specs, specs[grads[0]]).shape), True
            absent = Partial() if taken else None
            placements = layout.of(shape, absent, with_dims.get(op.differentiable[index]) if taken else None)
        whole.append(whole_tensor(gradient, layout, shape, placements))
    return whole[0] if single else tuple(whole)


def _combined(op: Op, given: Mapping[str, Any], layout: Layout) -> values.Combined | None:
    """Return how the op combines the results of ranks, or None where each rank's part is an independent call."""
    combined = op.sharding.combined
    if combined is None or layout.outside or all(dim is None for dim in layout.dims):
        return None
    cut = {dim - len(layout.shape) for dim in layout.dims if dim is not None}
    return combined if cut & {*combined.dims} or combined.applies(given) else None


def _ranks(
    name: str,
    func: Callable[..., Any],
    given: Mapping[str, Any],
    local: Mapping[str, Any],
    kwargs: dict[str, Any],
    layout: Layout,
    saves: bool,
    count: int,
) -> Combining:
    def serve(**changes: Any) -> tuple[Tensor, ...]:
        results = func(*{**local, **changes}.values(), **kwargs)
        return (results,) if isinstance(results, Tensor) else tuple(results[:count])

    shapes = {key: tuple(value.shape) for key, value in given.items() if isinstance(value, Tensor)}
    return Combining(name, layout, layout.shard(), saves, shapes, kwargs.get("backend"), serve)


def _plan_of_backward(op: Op, grad: Tensor, kwargs: Mapping[str, Any]) -> Plan:
    forward = plan_for(op, grad, kwargs.get("backend"))
    return backward_plan(forward, forward.first.backend if forward.first else "")


def _needs_composite(op: Op, local: Mapping[str, Any], shard: values.Shard) -> bool:
    """Return True where a kernel cannot take a part, as it counts positions from the part's own start."""
    sharding = op.sharding
    if sharding.forward is None or shard.part == shard.whole:
        return False
    return sharding.applies is None or sharding.applies(local)


def _with_dim(op: Op, given: Mapping[str, Any], dims: Sequence[int]) -> str:
    """Return the first parameter that has one of these dims."""
    with_dims = dims_by_name(op, given)
    return next(n for n in op.tensors if n in given and {*dims} & {*with_dims.get(n, range(-given[n].ndim, 0))})


def _report_composite(plan: Plan, args: tuple[Any, ...], cut: str) -> None:
    """Report the fallback, or raise, where a kernel for this device would have served the whole of a cut parameter."""
    kernel = select(plan, args)
    record = registry.find(kernel.backend)
    if record is None or record.backend is None or "*" in record.backend.device_types:
        return
    if any(planned.optional for planned in plan.backends if planned.backend == kernel.backend):
        return
    reason = Reason(
        ReasonCode.SHARD,
        f"a shard of {cut}",
        f"the whole {cut}: {plan.op.sharding.reason}",
        f"replicate it, as in {cut}.redistribute(placements=[Replicate()])",
    )
    if plan.policy.fallback != "raise":
        report(plan, kernel.backend, reason, "plain torch")
        return
    decision = decide(plan, args)
    refused = tuple(replace(c, status="refused", reasons=c.reasons or (reason,)) for c in decision.candidates)
    raise NoBackendError(replace(decision, backend=None, backward=None, candidates=refused))
