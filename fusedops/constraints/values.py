"""Constraints on an argument that is no tensor: their template, flags, choices and numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fusedops._contract.constraint import Arguments, Boundary, Constraint, constant, listed, shown
from fusedops._report.reason import Reason, ReasonCode

LARGEST = torch.finfo(torch.float32).max  # devices and torch's functions compute with no larger number
SYMBOLIC = (torch.SymFloat, torch.SymInt)


class Value(Constraint):
    """A template: a constraint on an argument that is no tensor.

    A subclass defines :meth:`accepts`, :meth:`rule`, :meth:`values` and :meth:`expression`, the compiled form of
    ``accepts``. Reasons, table rows and boundary cases follow.

    >>> from fusedops.constraints import Value
    >>> class Even(Value):
    ...     def expression(self, constants):
    ...         return f"{self.name} % 2 == 0"
    ...     def accepts(self, value):
    ...         return value % 2 == 0
    ...     def rule(self):
    ...         return "an even number"
    ...     def values(self):
    ...         yield from (2, 3)
    >>> print(Even("stride").reasons({"stride": 3})[0])
    got stride = 3, expected an even number; to fix: pass stride as an even number
    """

    code = ReasonCode.SCALAR

    def accepts(self, value: Any) -> bool:
        """Return True where the value meets the constraint."""
        raise NotImplementedError

    def rule(self) -> str:
        """Return the accepted values as a phrase."""
        raise NotImplementedError

    def fix_of(self, value: Any) -> str:
        """Return the fix for a value that is not accepted."""
        return f"pass {self.name} as {self.rule()}"

    def values(self) -> Iterator[Any]:
        """Yield values just inside and just outside."""
        raise NotImplementedError

    def reasons(self, args: Arguments) -> list[Reason]:
        value = args[self.name]
        if (value is None and self.none_is_met) or self.accepts(value):
            return []
        return [Reason(self.code, f"{self.name} = {shown(value)}", self.rule(), self.fix_of(value))]

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

    def fix_of(self, value: Any) -> str:
        return f"pass bool({self.name})"

    def values(self) -> Iterator[Any]:
        yield from (True, False, 1, None)


class OneOf(Value):
    """One of some texts, or one of some integers; with ``or_none``, or None.

    >>> from fusedops.constraints import OneOf
    >>> OneOf("approximate", "tanh", "none").describe()
    "approximate: 'tanh' or 'none'"
    """

    none_is_met = False

    def __init__(self, name: str, *choices: str | int, or_none: bool = False) -> None:
        super().__init__(name)
        self.none_is_met = or_none
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
        if value is None:
            return self.none_is_met
        return (isinstance(value, str) or type(value) is int) and value in self.choices

    def rule(self) -> str:
        return listed([*map(repr, self.choices), *["None"] * self.none_is_met])

    def values(self) -> Iterator[Any]:
        other = "another" if isinstance(self.choices[0], str) else max(map(int, self.choices)) + 1
        yield from (*self.choices, other, None)


class Scalar(Value):
    """A number is at most ``abs_at_most`` in absolute value, or is one of ``one_of``.

    >>> from fusedops.constraints import Scalar
    >>> Scalar("scale", abs_at_most=1.0).describe()
    'scale: a value in [-1, 1]'
    """

    def __init__(
        self, name: str, abs_at_most: float | None = None, one_of: tuple[bool | int | float | str, ...] | None = None
    ) -> None:
        super().__init__(name)
        if abs_at_most is None and not one_of:
            raise ValueError(
                f"Scalar({name!r}): expected abs_at_most, or at least one value in one_of; to fix: give it"
            )
        if abs_at_most is not None and (type(abs_at_most) not in (int, float) or not math.isfinite(abs_at_most)):
            raise ValueError(f"Scalar({name!r}): got {abs_at_most!r}, expected a finite number; to fix: give one")
        if one_of is not None and (
            not isinstance(one_of, (tuple, list))  # pyright: ignore[reportUnnecessaryIsInstance]
            or any(type(value) not in (bool, int, float, str) for value in one_of)
        ):
            raise ValueError(f"Scalar({name!r}): got {one_of!r}, expected bools, numbers or texts; to fix: give those")
        self.abs_at_most, self.one_of = abs_at_most, None if one_of is None else tuple(one_of)

    def expression(self, constants: dict[str, object]) -> str:
        tests: list[str] = []
        if self.abs_at_most is not None:
            bound = constant(constants, self.abs_at_most)
            tests.append(f"-{bound} <= {self.name} <= {bound}")
        if self.one_of is not None:
            tests.append(f"{self.name} in {constant(constants, self.one_of)}")
        return " and ".join(tests)

    def accepts(self, value: Any) -> bool:
        inside = self.abs_at_most is None or -self.abs_at_most <= value <= self.abs_at_most
        return inside and (self.one_of is None or value in self.one_of)

    def rule(self) -> str:
        choices = "" if self.one_of is None else listed([repr(value) for value in self.one_of])
        if self.abs_at_most is None:
            return choices
        interval = f"a value in [-{self.abs_at_most:g}, {self.abs_at_most:g}]"
        return f"{interval} and {choices}" if choices else interval

    def values(self) -> Iterator[Any]:
        yield from self.one_of or ()
        if self.one_of and all(isinstance(value, bool) for value in self.one_of):
            yield from {True, False} - set(self.one_of)
        elif numbers := [value for value in self.one_of or () if isinstance(value, (int, float))]:
            yield max(numbers) * 2 + 1
        if self.abs_at_most is not None:
            yield from (-self.abs_at_most, self.abs_at_most, self.abs_at_most * 1.5, -self.abs_at_most * 1.5)


class Finite(Value):
    """A Python number, finite in float32 and at least ``at_least`` if given; an int has at most 64 bits. None too
    if ``optional``.

    >>> from fusedops.constraints import Finite
    >>> print(Finite("eps").reasons({"eps": 1e39})[0])
    got eps = 1e+39, expected a Python number, finite in float32; to fix: pass eps as a Python number, finite in float32
    """

    def __init__(self, name: str, at_least: float | None = None, *, optional: bool = False) -> None:
        super().__init__(name)
        if type(optional) is not bool:
            raise ValueError(f"Finite({name!r}): got {optional!r}, expected True or False; to fix: write one of these")
        if at_least is not None and (type(at_least) not in (int, float) or not math.isfinite(at_least)):
            raise ValueError(f"Finite({name!r}): got {at_least!r}, expected a finite number; to fix: give one")
        self.at_least = at_least
        self.optional = optional

    @property
    def none_is_met(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True where the argument may be None."""
        return self.optional

    def expression(self, constants: dict[str, object]) -> str:
        low = constant(constants, -LARGEST if self.at_least is None else self.at_least)
        whole = f"{constant(constants, _is_long)}({self.name})"
        return f"{low} <= {self.name} <= {constant(constants, LARGEST)} if type({self.name}) is float else {whole}" + (
            "" if self.at_least is None else f" and {self.name} >= {low}"
        )

    def accepts(self, value: Any) -> bool:
        if value is None or isinstance(value, SYMBOLIC):
            return value is not None or self.optional
        low = -LARGEST if self.at_least is None else self.at_least
        return bool(low <= value <= LARGEST if isinstance(value, float) else _is_long(value) and value >= low)

    def rule(self) -> str:
        minimum = "" if self.at_least is None else f" of at least {self.at_least:g}"
        return f"a Python number{minimum}, finite in float32" + (", or None" if self.optional else "")

    def fix_of(self, value: Any) -> str:
        if hasattr(value, "item"):
            return f"use {self.name}.item()"
        return super().fix_of(value)

    def values(self) -> Iterator[Any]:
        yield from (0.0, 1, 1.5, 1e39, math.inf, math.nan, 2**70, None)
        if self.at_least is None:
            yield -0.7
        else:
            yield from (self.at_least, self.at_least - 1)


class Integer(Value):
    """A Python integer of at most 64 bits, as in torch.

    >>> from fusedops.constraints import Integer
    >>> print(Integer("ignore_index").reasons({"ignore_index": -1.0})[0])
    got ignore_index = -1.0, expected a 64-bit integer; to fix: pass ignore_index as a 64-bit integer
    """

    none_is_met = False

    def expression(self, constants: dict[str, object]) -> str:
        return f"type({self.name}) is int and -{2**63} <= {self.name} < {2**63}"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, torch.SymInt) or (type(value) is int and -(2**63) <= value < 2**63)

    def rule(self) -> str:
        return "a 64-bit integer"

    def values(self) -> Iterator[Any]:
        yield from (0, -100, 2**63 - 1, -(2**63), 2**63, 1.0, True, None)

    def examples(self, args: Arguments) -> Mapping[str, Any]:
        return {f"{self.name} = {value}": value for value in (-100, 0, 2**40)}


class Probability(Value):
    """A Python number in [0, 1].

    >>> from fusedops.constraints import Probability
    >>> Probability("p").describe()
    'p: a number in [0, 1]'
    """

    none_is_met = False

    def expression(self, constants: dict[str, object]) -> str:
        return f"isinstance({self.name}, {constant(constants, (float, int))}) and 0 <= {self.name} <= 1"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, SYMBOLIC) or (isinstance(value, (float, int)) and 0 <= value <= 1)

    def rule(self) -> str:
        return "a number in [0, 1]"

    def values(self) -> Iterator[Any]:
        yield from (0, 0.0, 0.5, 1, 1.0, -0.1, 1.1, math.nan)

    def examples(self, args: Arguments) -> Mapping[str, Any]:
        return {f"{self.name} = {value!r}": value for value in (0, 0.5, 1.0)}


class Count(Value):
    """A positive integer; None too unless ``optional`` is False.

    >>> from fusedops.constraints import Count
    >>> print(Count("chunk").reasons({"chunk": 0})[0])
    got chunk = 0, expected a positive integer, or None; to fix: pass chunk as a positive integer, or None
    """

    def __init__(self, name: str, *, optional: bool = True) -> None:
        super().__init__(name)
        if type(optional) is not bool:
            raise ValueError(f"Count({name!r}): got {optional!r}, expected True or False; to fix: write one of these")
        self.optional = optional

    @property
    def none_is_met(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True where the argument may be None."""
        return self.optional

    def expression(self, constants: dict[str, object]) -> str:
        return f"type({self.name}) is int and 0 < {self.name} < {2**63}"

    def accepts(self, value: Any) -> bool:
        if value is None:
            return self.optional
        return isinstance(value, torch.SymInt) or (type(value) is int and 0 < value < 2**63)

    def rule(self) -> str:
        return "a positive integer" + (", or None" if self.optional else "")

    def values(self) -> Iterator[Any]:
        yield from (1, 7, 2**63 - 1, 0, -1, 2**63, 1.0, True, None)

    def examples(self, args: Arguments) -> Mapping[str, Any]:
        return {f"{self.name} = {value}": value for value in (1, 7, 2**40)}


def _is_long(value: Any) -> bool:
    """Return True for an int that torch takes as a number, for a float subclass, and for a symbolic number."""
    if isinstance(value, SYMBOLIC):  # in a traced call; reading its value would compile for that value alone
        return True
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return isinstance(value, float) and -LARGEST <= value <= LARGEST
