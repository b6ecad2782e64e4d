"""Constraints on an argument that is no tensor: what they share, flags, and choices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fusedops._contract.constraint import Arguments, Boundary, Constraint, constant, listed, shown
from fusedops._report.reason import Reason, ReasonCode


class Value(Constraint):
    """A constraint on an argument that is no tensor. Subclasses define what they accept."""

    reads_metadata_only = True
    code = ReasonCode.SCALAR

    def accepts(self, value: Any) -> bool:
        """Return True where the value meets the constraint."""
        raise NotImplementedError

    def rule(self) -> str:
        """Return what is accepted, as a phrase."""
        raise NotImplementedError

    def fix(self, value: Any) -> str:
        """Return what to do about a value that is not accepted."""
        return f"pass {self.name} as {self.rule()}"

    def values(self) -> Iterator[Any]:
        """Yield values at the edges."""
        raise NotImplementedError

    def reasons(self, args: Arguments) -> list[Reason]:
        value = args[self.name]
        if (value is None and self.none_is_met) or self.accepts(value):
            return []
        return [Reason(self.code, f"{self.name} = {shown(value)}", self.rule(), self.fix(value))]

    def describe(self) -> str:
        return f"{self.name}: {self.rule()}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        for value in self.values():
            yield Boundary(f"{self.name} = {value!r}", {**args, self.name: value}, self.accepts(value))

    def examples(self, args: Arguments) -> Mapping[str, Any]:
        return {f"{self.name} = {value!r}": value for value in self.values() if self.accepts(value)}


class Flag(Value):
    """True or False, as a bool.

    >>> from fusedops.constraints import Flag
    >>> print(Flag("causal").reasons({"causal": 1})[0])
    got causal = 1, expected True or False; to fix: pass bool(causal)
    """

    none_is_met = False

    def expression(self, constants: dict[str, object]) -> str:
        return f"{self.name} is True or {self.name} is False"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, bool)

    def rule(self) -> str:
        return "True or False"

    def fix(self, value: Any) -> str:
        return f"pass bool({self.name})"

    def values(self) -> Iterator[Any]:
        yield from (True, False, 1, None)


class OneOf(Value):
    """One of some texts, or one of some integers.

    >>> from fusedops.constraints import OneOf
    >>> OneOf("approximate", "tanh", "none").describe()
    "approximate: 'tanh' or 'none'"
    """

    none_is_met = False

    def __init__(self, name: str, *choices: str | int) -> None:
        super().__init__(name)
        if {type(choice) for choice in choices} not in ({str}, {int}):
            raise ValueError(
                f"OneOf({name!r}): got {choices!r}, expected texts, or integers; to fix: give at least one str or int"
            )
        self.choices = choices

    def expression(self, constants: dict[str, object]) -> str:
        # a set, not a tuple: an array would be compared with each text, element by element
        member = f"{self.name} in {constant(constants, frozenset(self.choices))}"
        return member if type(self.choices[0]) is str else f"type({self.name}) is int and {member}"

    def accepts(self, value: Any) -> bool:
        return (isinstance(value, str) or type(value) is int) and value in self.choices

    def rule(self) -> str:
        return listed([repr(choice) for choice in self.choices])

    def values(self) -> Iterator[Any]:
        other = "another" if isinstance(self.choices[0], str) else max(map(int, self.choices)) + 1
        yield from (*self.choices, other, None)
