"""Constraints that compare a positive integer with other arguments: their template, and the divisor of a size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fusedops._contract.constraint import Arguments, Boundary, Constraint, constant, shown
from fusedops._report.reason import Reason, ReasonCode
from fusedops.constraints.tensors import has_dim, integers, possible


class CountBeside(Constraint):
    """A template: a constraint that compares a positive integer with other arguments.

    A subclass defines :attr:`beside`, :attr:`text`, :meth:`fits`, :meth:`needed` and :meth:`candidates`.

    Attributes:
        beside: the names of the other arguments.
        text: the accepted integers as a phrase, for tables.
    """

    code = ReasonCode.SCALAR
    none_is_met = False
    beside: tuple[str, ...] = ()
    text = ""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.beside)

    def fits(self, value: int, *others: Any) -> bool:
        """Return True where a positive integer is accepted with the other arguments."""
        raise NotImplementedError

    def needed(self, *others: Any) -> str:
        """Return the integers that are accepted with the other arguments, as a phrase."""
        raise NotImplementedError

    def candidates(self, *others: Any) -> list[int]:
        """Return integers just inside and just outside."""
        raise NotImplementedError

    def expression(self, constants: dict[str, object]) -> str:
        return f"{constant(constants, self.accepts)}({', '.join(self.names)})"

    def accepts(self, value: Any, *others: Any) -> bool:
        """Return True for an accepted integer, and for other values, which another constraint checks."""
        if isinstance(value, torch.SymInt):
            return self.fits(value, *others)  # pyright: ignore[reportArgumentType]
        return type(value) is not int or value < 1 or self.fits(value, *others)

    def reasons(self, args: Arguments) -> list[Reason]:
        value, others = args[self.name], [args[name] for name in self.beside]
        if self.accepts(value, *others):
            return []
        needed = self.needed(*others)
        given = f"{self.name} = {shown(value)}"
        return [Reason(self.code, given, needed, f"pass {self.name} as {needed}")]

    def describe(self) -> str:
        return f"{self.name}: {self.text}"

    def _values(self, args: Arguments) -> list[int]:
        """Return positive integers just inside and just outside."""
        values = (*self.candidates(*(args[name] for name in self.beside)), 1)
        return [*dict.fromkeys(value for value in values if value > 0)]

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        others = [args[name] for name in self.beside]
        for value in self._values(args):
            yield Boundary(f"{self.name} = {value!r}", {**args, self.name: value}, self.accepts(value, *others))

    def examples(self, args: Arguments) -> Mapping[str, Any]:
        others = [args[name] for name in self.beside]
        return {f"{self.name} = {value}": value for value in self._values(args) if self.accepts(value, *others)}


class Divisor(CountBeside):
    """A positive integer divides a size of a tensor.

    Args:
        name: the integer.
        other: the tensor.
        dim: the dim of that size, by default the last.

    >>> import fusedops
    >>> from fusedops.constraints import Divisor
    >>> print(Divisor("n", "x").reasons({"n": 3, "x": fusedops.TensorSpec((2, 8))})[0])
    got n = 3, expected a divisor of the last size of x, 8; to fix: pass n as a divisor of the last size of x, 8
    """

    def __init__(self, name: str, other: str, dim: int = -1) -> None:
        super().__init__(name)
        self.other = Constraint(other).name  # checked the same way
        self.beside = (self.other,)
        (self.dim,) = integers("Divisor", name, (dim,))
        self.text = f"a divisor of {'the last size' if dim == -1 else f'dim {dim}'} of {self.other}"

    def expression(self, constants: dict[str, object]) -> str:
        return f"{self.name} == 1 or {super().expression(constants)}"

    def fits(self, value: int, *others: Any) -> bool:
        return not has_dim(others[0], self.dim) or possible(others[0].shape[self.dim] % value == 0)

    def needed(self, *others: Any) -> str:
        return f"{self.text}, {self._size(others[0])}"

    def candidates(self, *others: Any) -> list[int]:
        size = self._size(others[0])
        return [2, 3, 4, size // 2, size, size + 1]

    def _size(self, tensor: Any) -> int:
        return tensor.shape[self.dim] if has_dim(tensor, self.dim) else 1
