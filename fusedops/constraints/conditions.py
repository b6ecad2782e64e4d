"""Constraints on presence and on the device's capability, and constraints that depend on another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fusedops._contract.constraint import Arguments, Boundary, Constraint, constant
from fusedops._contract.tensor_spec import TensorSpec, capability_of
from fusedops._report.reason import Reason, ReasonCode
from fusedops.constraints.tensors import integers


class Present(Constraint):
    """An optional argument is given (``present=True``) or left out.

    Args:
        name: the argument.
        present: True where it is required, False where it is not accepted.
        fix: the text of the fix, where "call it with ..." is not enough.

    >>> from fusedops.constraints import Present
    >>> Present("mask").describe(), Present("mask", False).describe()
    ('mask: required', 'mask: not accepted')
    """

    code = ReasonCode.PRESENCE
    none_is_met = False

    def __init__(self, name: str, present: bool = True, *, fix: str = "") -> None:
        super().__init__(name)
        if type(present) is not bool:
            raise ValueError(f"Present({name!r}): got {present!r}, expected True or False; to fix: write one of these")
        self.present, self.fix = present, fix

    def expression(self, constants: dict[str, object]) -> str:
        return f"{self.name} is {'not ' if self.present else ''}None"

    def reasons(self, args: Arguments) -> list[Reason]:
        if (args[self.name] is not None) == self.present:
            return []
        given = f"{self.name} = None" if self.present else f"a {self.name}"
        needed = f"{'a' if self.present else 'no'} {self.name}"
        return [Reason(self.code, given, needed, self.fix or f"call it with {needed}")]

    def describe(self) -> str:
        return f"{self.name}: {'required' if self.present else 'not accepted'}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        yield Boundary(f"{self.name} None", {**args, self.name: None}, not self.present)
        if args[self.name] is not None:
            yield Boundary(f"{self.name} given", args, self.present)


class Capability(Constraint):
    """The compute capability of the tensor's device is at least ``at_least``; met where it is unknown (a CPU, a spec).

    >>> from fusedops.constraints import Capability
    >>> Capability("x", (9, 0)).describe()
    'compute capability at least 9.0'
    """

    code = ReasonCode.CAPABILITY

    def __init__(self, name: str, at_least: tuple[int, int]) -> None:
        super().__init__(name)
        if len(integers("Capability", name, at_least)) != 2:
            raise ValueError(f"Capability({name!r}): got {at_least!r}, expected two ints; to fix: write it like (9, 0)")
        self.at_least = at_least

    def expression(self, constants: dict[str, object]) -> str:
        return f"({constant(constants, capability_of)}({self.name}) or {self.at_least!r}) >= {self.at_least!r}"

    def reasons(self, args: Arguments) -> list[Reason]:
        tensor = args[self.name]
        capability = None if tensor is None else capability_of(tensor)
        if capability is None or capability >= self.at_least:
            return []
        given = f"compute capability {'.'.join(map(str, capability))} of the device of {self.name}"
        return [Reason(self.code, given, f"at least {'.'.join(map(str, self.at_least))}", "run on a newer device")]

    def describe(self) -> str:
        return f"compute capability at least {'.'.join(map(str, self.at_least))}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        spec: TensorSpec | None = args[self.name]
        if spec is None:
            return
        major, minor = self.at_least
        below = (major, minor - 1) if minor else (major - 1, 9)
        for capability, taken in ((below, False), (self.at_least, True), ((major + 1, 0), True)):
            changed = {**args, self.name: spec.replace(capability=capability)}
            yield Boundary(f"capability {capability}", changed, taken)


class When(Constraint):
    """``then`` applies only to calls that meet ``condition``.

    >>> import torch
    >>> from fusedops.constraints import DType, Scalar, When
    >>> When(DType("x", torch.float16), Scalar("scale", 1.0)).describe()
    'scale: a value in [-1, 1] if x: float16'
    """

    none_is_met = False

    def __init__(self, condition: Constraint, then: Constraint) -> None:
        for item in (condition, then):
            if not isinstance(item, Constraint):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(f"When: got {item!r}, expected a constraint; to fix: write one such as Rank('x', 4)")
        super().__init__(then.name)
        self.condition, self.then = condition, then
        self.code = then.code

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.condition.names, *self.then.names)

    def to_dict(self) -> dict[str, object]:
        fields = super().to_dict()
        fields.pop("code")
        return fields

    def expression(self, constants: dict[str, object]) -> str:
        return f"not {self.condition.test(constants)} or {self.then.test(constants)}"

    def reasons(self, args: Arguments) -> list[Reason]:
        if self.condition.reasons(args):
            return []
        suffix = f" (with {self.condition.describe()})"
        return [Reason(r.code, r.given, r.needed + suffix, r.fix) for r in self.then.reasons(args)]

    def describe(self) -> str:
        conditions, then = [self.condition.describe()], self.then
        while isinstance(then, When):
            conditions.append(then.condition.describe())
            then = then.then
        return f"{then.describe()} if {', and '.join(reversed(conditions))}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        for outer in self.condition.boundaries(args):
            for inner in self.then.boundaries(outer.args):
                # if both are on one argument, the inner case replaces the value of the outer case: test the result
                taken = not self.reasons(inner.args)
                yield Boundary(f"{outer.label}, {inner.label}", inner.args, taken)

    def examples(self, args: Arguments) -> Mapping[str, Any]:
        return self.then.examples(args)
