"""explain: the decision for a call, without running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fusedops._contract.op import Op
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._plugins.registry import registry
from fusedops._policy.context import active_policy
from fusedops._report.suggestion import unknown_name
from fusedops.errors import InvalidInputError, PolicyError

if TYPE_CHECKING:
    from fusedops._report.decision import Decision


def explain(op: str | Callable[..., Any], /, *args: Any, backend: str | None = None, **kwargs: Any) -> Decision:
    """Return which backend would serve a call of ``op``, which refuse it, why, and the fixes. Runs nothing.

    Args:
        op: the op's name, or its public function.
        *args: the call's arguments. Each tensor may be real, meta, fake, or a :class:`TensorSpec`; a spec may be on a
            device that this machine does not have.
        **kwargs: the same, by name.
        backend: as on the op itself.

    Raises:
        InvalidInputError: the op does not accept these arguments on any backend, or a spec is on a device type that
            neither torch nor a backend has.
        PolicyError: an unknown op or backend.

    >>> import fusedops
    >>> decision = fusedops.explain("bias_gelu", fusedops.TensorSpec((8, 64)), backend="eager")
    >>> decision.backend, decision.backward
    ('eager', 'eager')
    """
    from fusedops._dispatch.selection.decide import decide  # not at import: the decision's data classes take 5 ms
    from fusedops._dispatch.selection.plan import make_plan

    contract = find_op(op, "explain")
    for name, arg in zip(contract.parameters, contract.bind(args, kwargs)):
        unknown = registry.unknown_device_type(arg.device_type) if isinstance(arg, TensorSpec) else ""
        if unknown:
            raise InvalidInputError(f"explain: {contract.name}: {name}: {unknown}")
    given = contract.bound_specs(args, kwargs)
    first: TensorSpec = given[0]
    active = active_policy() if backend is None else active_policy().with_argument(backend)
    kind = first.device_type
    assumed = (
        "" if is_here(kind) else f"a machine with {kind} and the backends for it installed; this one has no {kind}"
    )
    decision = decide(make_plan(contract, active, kind, assume=bool(assumed)), given, assumed)
    selected = registry.find(decision.backend) if assumed and decision.backend else None
    others = [each.backend for each in decision.candidates if each.status == "eligible"]
    if selected is not None and selected.backend is not None and selected.backend.optional and others:
        needs = selected.backend.needs
        if needs != "torch":  # which is there
            return replace(decision, assumed=f"{assumed}; without {needs}, {others[0]} runs it")
    return decision


def find_op(op: object, caller: str) -> Op:
    """Return an op by its name or its public function; PolicyError where there is none."""
    name = op if isinstance(op, str) else getattr(op, "__name__", op)
    if isinstance(name, str) and name not in registry.ops:
        registry.records()  # it may be a plugin's
    if not isinstance(name, str) or name not in registry.ops:
        raise PolicyError(f"{caller}: {unknown_name('op', str(name), list(registry.ops))}")
    return registry.ops[name]


def is_here(device_type: str) -> bool:
    """Return True where this machine has a device of that type. Imports no vendor's library."""
    if device_type in ("cpu", "meta"):
        return True
    module = getattr(torch, device_type, None)
    return module is not None and hasattr(module, "is_available") and bool(module.is_available())
