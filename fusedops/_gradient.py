"""Calls under autograd: for each op a function that runs its kernel and remembers which backend serves the gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._C._functorch import (
    is_legacy_batchedtensor,  # what is_grads_batched=True hands to backward
)
from torch._C._functorch import (
    peek_interpreter_stack as functorch_level,  # pyright: ignore[reportPrivateUsage,reportMissingModuleSource,reportUnknownVariableType]
)
from torch._functorch.utils import (
    unwrap_dead_wrappers,  # pyright: ignore[reportUnknownVariableType]
)
from torch.autograd import forward_ad, profiler

if TYPE_CHECKING:
    from fusedops._op import Op

_SOURCE = """
class {name}(Function):
    @staticmethod
    def forward(ctx, entry, backward, {names}):
        y = entry.call({names})
        ctx.save_for_backward({saved})
        ctx.rest = backward, {rest}
        return y

    @staticmethod
    def backward(ctx, grad):
        _, _, {asks} = ctx.needs_input_grad
        {saved} = ctx.saved_tensors
        backward, {rest_there} = ctx.rest
        {before}
        if {any}:
            # create_graph=True, a batched or a dual grad: a kernel's result has no graph, and sees no batch or tangent
            plain = is_grad_enabled() or transformed() or is_legacy_batchedtensor(grad)
            needs = ({needs})
            if plain:
                call = reference_backward
            else:
                next(backward.count)
                call = (backward.ranged() if profiler._is_profiler_enabled else backward).call
            {gradients} = call(grad, {kept})
        else:
            {gradients} = {nothing}
        {after}
        return None, None, {returned}

def with_gradient(plan, entry, {names}):
    after = plan.backward.get(entry.backend) or backward_plan(plan, entry.backend)
    backward = after.first
    if backward is None or backward.check is not None:  # now, so that a refusal is seen in time
        y, needs = {first}, ()  # x stands in for its output and for the gradient
        backward = after.pick(({first}, {stand_in}))
    return apply(*unwrap_dead_wrappers((entry, backward, {names})))
"""


@cache  # bind has it too
def make_gradient(op: Op) -> Callable[..., torch.Tensor]:
    """Builds ``with_gradient(plan, entry, *args)``, with the op's own arguments written out.

    A call costs 11.5 us so. In loops over ``args``, and through ``Function.apply``'s own Python, whose cases cannot be
    here (functorch is not at work, and there is no ``setup_context``), it was 18.
    """
    places = [(what, op.parameters[at] if at >= 0 else what) for what, at in op.kept]
    saved = [name for what, name in places if what == "y" or (what == "argument" and name in op.tensors)]
    scalars = [name for what, name in places if what == "argument" and name not in op.tensors]
    dtypes = [name for what, name in places if what == "dtype"]
    wanted = list(op.differentiable)
    found = {name: f"d_{name}" for name in wanted}
    if op.passed_through:
        found[op.passed_through] = f"grad if asks_{op.passed_through} else None"
    x = op.parameters[0]
    asked = ", ".join(f"{name}_dtype" if what == "dtype" else name for what, name in places if what != "needs")
    kept = [f"{name}.dtype" if what == "dtype" else name for what, name in places]
    source = _SOURCE.format(
        name=f"_{op.name}",
        names=", ".join(op.parameters),
        first=x,
        saved=_tuple(saved),
        rest=_tuple([*scalars, *(f"{name}.dtype" for name in dtypes)]),
        rest_there=_tuple([*scalars, *(f"{name}_dtype" for name in dtypes)]),
        asks=_tuple([f"asks_{name}" for name in op.parameters]),
        any=" or ".join(f"asks_{name}" for name in wanted),
        needs=_tuple([f"asks_{name}" for name in wanted]),
        before=f"same = asks_{x} and identity(grad, {asked}); asks_{x} = asks_{x} and not same" if op.identity else "",
        after=f"if same: d_{x} = grad" if op.identity else "",
        gradients=", ".join(found[name] for name in wanted),
        nothing=", ".join("None" for _ in wanted),
        kept=", ".join(f"{name}_dtype" if what == "dtype" else name for what, name in places),
        returned=", ".join(found.get(name, "None") for name in op.parameters),
        stand_in=", ".join(kept),
    )
    known: dict[str, Any] = {
        "Function": torch.autograd.Function,
        "is_grad_enabled": torch.is_grad_enabled,
        "is_legacy_batchedtensor": is_legacy_batchedtensor,
        "profiler": profiler,
        "transformed": transformed,
        "reference_backward": op.backward,
        "identity": op.identity,
        "unwrap_dead_wrappers": unwrap_dead_wrappers,
        "backward_plan": _backward_plan,
    }
    exec(compile(source, f"{__file__} {op.name}", "exec"), known)  # named so that a warning does not point here
    function: Any = super(torch.autograd.Function, known[f"_{op.name}"])
    known["apply"] = function.apply
    return known["with_gradient"]


def _tuple(names: list[str]) -> str:
    return "".join(f"{name}, " for name in names)


def _backward_plan(plan: Any, forward: str) -> Any:
    from fusedops._plan import backward_plan  # which is loaded at the first call

    return backward_plan(plan, forward)


def transformed() -> bool:
    """Whether a functorch transform or forward-mode differentiation is at work: it can transform plain torch alone."""
    level = cast("object", functorch_level())
    dual = cast("int", forward_ad._current_level)  # pyright: ignore[reportPrivateUsage]
    return level is not None or dual >= 0
