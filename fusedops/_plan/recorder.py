"""Recorder: the decision for each call of an op in a plan, and counts of what torch computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast
from weakref import ReferenceType

from torch import Tensor
from torch.nn import Module

from fusedops._contract.device_spec import DeviceSpec
from fusedops._contract.op import Op
from fusedops._contract.signature import with_floats
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._dispatch.registered.implementations import whole_arguments
from fusedops._dispatch.selection.decide import adaptations_of, call_text
from fusedops._dispatch.selection.plan import Assumed, Plan, make_plan
from fusedops._plan.report import PlanRow, Work
from fusedops._plan.shape_tensor import ShapeTensor, frames
from fusedops._plugins.registry import registry
from fusedops._policy.context import ActivePolicy, active_policy
from fusedops._report.direction import Direction
from fusedops._report.event import Refusal

_BACKWARD = "_backward"


class Recorder:
    """The recorder of a plan, to which its tensors report.

    Args:
        spec: the device of the plan.
        assume: the device is not here: the packages that it has. False where it is asked.
    """

    def __init__(self, spec: DeviceSpec, assume: Assumed) -> None:
        self.spec, self.device_type = spec, spec.type
        self.tensors: list[ReferenceType[ShapeTensor]] = []
        self._assume = assume
        self._plans: dict[Any, Plan] = {}
        self.begin()

    def begin(self) -> None:
        """Drop what was recorded."""
        self._calls: Counter[Any] = Counter()
        self._bytes: Counter[Any] = Counter()
        self._rows: dict[Any, PlanRow] = {}
        self._forward: dict[Any, tuple[str | None, str, tuple[Any, ...], ActivePolicy]] = {}
        self._torch: dict[tuple[str, str], Work] = {}
        self._assumed: Counter[str] = Counter()

    def op_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], nbytes: int) -> None:
        """Record a call of a registered op."""
        name = func._schema.name.partition("::")[2]
        direction: Direction = "forward" if name in registry.ops else "backward"
        op = registry.ops[name if direction == "forward" else name.removesuffix(_BACKWARD)]
        active, backend = active_policy(), kwargs.get("backend")
        if backend is not None:
            active = active.with_argument(backend)
        if direction == "forward":
            specs = with_floats(self._specs(whole_arguments(op, args)), op.float_indices)
            site = _module_class()
            key = op.name, direction, active, site, specs
            if key not in self._rows:
                plan = self._plan(op, active, direction, None)
                self._rows[key] = self._decided(plan, specs, site, specs)
            self._forward[self._link(op, op.parameters, specs)] = (self._rows[key].backend, site, specs, active)
        else:
            specs = self._specs(args)
            link = self._link(op, op.backward_parameters, specs)
            served, site, of_forward, active = self._forward.get(link, ("", "", (), active))
            key = op.name, direction, active, site, specs, served
            if key not in self._rows:
                plan = self._plan(op, active, direction, served)
                # selected before forward runs, from placeholders, as serve() does
                placeholders = op.placeholder_backward_args(of_forward) if of_forward else specs
                self._rows[key] = self._decided(plan, placeholders, site, specs)
        self._calls[key] += 1
        self._bytes[key] += nbytes

    def torch_call(self, name: str, kind: str, nbytes: int, products: int) -> None:
        """Record a call that torch computes."""
        work = self._torch.get((kind, name), Work())
        self._torch[kind, name] = Work(work.calls + 1, work.bytes + nbytes, work.products + products)

    def assume(self, text: str) -> None:
        """Record an assumption."""
        self._assumed[text] += 1

    def _specs(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(map(self._spec, args))

    def _spec(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return TensorSpec(tuple(arg.shape), arg.dtype, self.device_type, self.spec.capability)
        return tuple(cast("list[Any]", arg)) if isinstance(arg, list) else arg  # torch passes a bool[] as a list

    def _link(self, op: Op, names: Sequence[str], specs: Sequence[Any]) -> Any:
        """Return what a forward call and its backward have in common: the arguments that both take."""
        given = dict(zip(names, specs))
        return op.name, *(given[name] for name in op.parameters if name in op.backward_types)

    def _plan(self, op: Op, active: ActivePolicy, direction: Direction, prefer: str | None) -> Plan:
        key = op.name, active, direction, prefer
        if key not in self._plans:
            self._plans[key] = make_plan(op, active, self.spec.type, direction, assume=self._assume, prefer=prefer)
        return self._plans[key]

    def _decided(self, plan: Plan, decisive: tuple[Any, ...], site: str, given: tuple[Any, ...]) -> PlanRow:
        kernel, refused = plan.survey(decisive)
        call = plan.op.name, plan.direction, site, call_text(plan.parameters, given)
        refusals = plan.refusals(refused, decisive)
        if kernel is None:
            absent = [each for each in plan.backends if each.refusal is not None and not each.silent]
            never = [Refusal(each.backend, each.refusal.detail, each.refusal) for each in absent if each.refusal]
            return PlanRow(*call, None, False, 0, 0, (*never, *refusals))
        record = registry.find(kernel.backend)
        is_fused = record is None or record.backend is None or "*" not in record.backend.device_types
        deviations = [f"{each.name}: {each.sentence}" for each in kernel.kernel.deviations]
        if not self.spec.documents(kernel.kernel.source):
            deviations.append(f"not documented for {self.spec.chip}")
        refusals = *plan.absent(kernel.backend), *refusals
        adaptations = adaptations_of(kernel, decisive)
        return PlanRow(*call, kernel.backend, is_fused, 0, 0, refusals, tuple(deviations), adaptations)

    @property
    def torch(self) -> dict[tuple[str, str], Work]:
        """The calls that torch computes, by kind and function."""
        return self._torch

    @property
    def assumed(self) -> list[str]:
        """The assumptions, with how often each was made."""
        return [f"{text} ({count} times)" if count > 1 else text for text, count in self._assumed.items()]

    def rows(self) -> tuple[PlanRow, ...]:
        """Return the calls of ops, the ones that are alike as one row."""
        return tuple(replace(row, calls=self._calls[key], bytes=self._bytes[key]) for key, row in self._rows.items())


def _module_class() -> str:
    """Return the class of the module that calls an op."""
    for frame in frames():
        for name in ("module", "self"):
            owner = frame.f_locals.get(name)
            if isinstance(owner, Module):
                return type(owner).__name__
    return ""
