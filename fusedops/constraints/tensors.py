"""Constraints on one tensor: their template, its rank and its sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fusedops._contract.constraint import Arguments, Boundary, Constraint, listed
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._report.reason import Reason, ReasonCode


def possible(condition: bool | torch.SymBool) -> bool:
    """Return a condition on sizes as a bool. True if it depends on data: it is checked again when the graph runs.

    >>> from fusedops.constraints.tensors import possible
    >>> possible(2 == 3)
    False
    """
    if not isinstance(condition, torch.SymBool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return guard_or_true(condition)


class TensorConstraint(Constraint):
    """A template: a constraint on a tensor, and perhaps on other arguments. It is met if the tensor is None.

    A subclass defines :meth:`accepts`, :meth:`rule`, :meth:`fix_of`, :meth:`values` and :meth:`expression`, the
    compiled form of ``accepts``. Reasons, table rows and boundary cases follow. All but ``rule`` and ``expression``
    take the arguments that :attr:`names` lists.

    >>> import fusedops
    >>> from fusedops.constraints import TensorConstraint
    >>> class NotEmpty(TensorConstraint):
    ...     def expression(self, constants):
    ...         return f"{self.name}.numel() > 0"
    ...     def accepts(self, tensor):
    ...         return tensor.numel() > 0
    ...     def rule(self):
    ...         return "at least one element"
    ...     def fix_of(self, tensor):
    ...         return f"pass a larger {self.name}"
    ...     def values(self, tensor):
    ...         yield f"{self.name} (0,)", tensor.replace(shape=(0,))
    ...         yield f"{self.name} (1,)", tensor.replace(shape=(1,))
    >>> print(NotEmpty("x").reasons({"x": fusedops.TensorSpec((0, 3))})[0])
    got x of shape (0, 3), expected at least one element; to fix: pass a larger x
    """

    def accepts(self, *args: Any, **kwargs: Any) -> bool:
        """Return True where the arguments meet the constraint."""
        raise NotImplementedError

    def rule(self) -> str:
        """Return the accepted tensors as a phrase, for tables."""
        raise NotImplementedError

    def given(self, *args: Any, **kwargs: Any) -> str:
        """Return the property of the tensor that the constraint refuses, as a noun phrase."""
        return f"{self.name} of shape {tuple(args[0].shape)}"

    def needed(self, *args: Any, **kwargs: Any) -> str:
        """Return the tensors that are accepted with these arguments, for a reason."""
        return self.rule()

    def fix_of(self, *args: Any, **kwargs: Any) -> str:
        """Return the fix for a tensor that is not accepted."""
        raise NotImplementedError

    def values(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, TensorSpec]]:
        """Yield tensors just inside and just outside, each with a label."""
        raise NotImplementedError

    def shaped(self, tensor: TensorSpec, shapes: Iterable[tuple[int, ...]]) -> Iterator[tuple[str, TensorSpec]]:
        """Yield the tensor with each of these shapes, for :meth:`values`."""
        for shape in shapes:
            yield f"{self.name} {shape}", tensor.replace(shape=shape)

    def arguments(self, args: Arguments) -> tuple[Any, ...] | None:
        """Return the call's arguments that :attr:`names` lists, or None if the constraint is met without them."""
        return None if args[self.name] is None else tuple(args[name] for name in self.names)

    def reasons(self, args: Arguments) -> list[Reason]:
        values = self.arguments(args)
        if values is None or self.accepts(*values):
            return []
        return [Reason(self.code, self.given(*values), self.needed(*values), self.fix_of(*values))]

    def describe(self) -> str:
        return f"{self.name}: {self.rule()}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        values = self.arguments(args)
        if values is None:
            return
        for label, spec in self.values(*values):
            yield Boundary(label, {**args, self.name: spec}, self.accepts(spec, *values[1:]))


def resized(spec: TensorSpec, dim: int, size: int) -> TensorSpec:
    """Return the spec with another size of one dim."""
    shape = list(spec.shape)
    shape[dim] = size
    return spec.replace(shape=tuple(shape))


def has_dim(tensor: Any, dim: int) -> bool:
    """Return True where the tensor has the dim, which may be counted from the last."""
    return -tensor.dim() <= dim < tensor.dim()


class Rank(TensorConstraint):
    """The number of dimensions of a tensor is one of ``ranks``, or at least ``at_least``.

    >>> from fusedops.constraints import Rank
    >>> Rank("x", 4).describe()
    'x: 4-D'
    """

    code = ReasonCode.RANK

    def __init__(self, name: str, *ranks: int, at_least: int | None = None) -> None:
        super().__init__(name)
        self.ranks = integers("Rank", name, ranks)
        self.at_least = integer("Rank", name, at_least)
        if bool(ranks) == (at_least is not None):
            raise ValueError(f"Rank({name!r}): expected ranks, such as 3, 4, or at_least; to fix: give one of the two")

    def expression(self, constants: dict[str, object]) -> str:
        if self.at_least is not None:
            return f"{self.name}.dim() >= {self.at_least}"
        if len(self.ranks) == 1:
            return f"{self.name}.dim() == {self.ranks[0]}"
        return f"{self.name}.dim() in {self.ranks!r}"

    def accepts(self, tensor: Any) -> bool:
        return tensor.dim() in self.ranks if self.at_least is None else tensor.dim() >= self.at_least

    def given(self, tensor: Any) -> str:
        return f"{self.name} with {tensor.dim()} dimension{'s' * (tensor.dim() != 1)}"

    def needed(self, tensor: Any) -> str:
        return f"{self._counts()} dimension{'s' * (self._counts() != '1')}"

    def fix_of(self, tensor: Any) -> str:
        rank = self.at_least or max(self.ranks)
        if tensor.dim() < rank:
            return f"view {self.name} with {rank} dimensions, with leading ones of size 1"
        return f"merge leading dimensions of {self.name} until it has {rank}"

    def _counts(self) -> str:
        return listed(self.ranks) if self.at_least is None else f"at least {self.at_least}"

    def rule(self) -> str:
        return f"{self._counts()}-D" if self.ranks else f"{self._counts()} dimensions"

    def values(self, tensor: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        edges = self.ranks or (self.at_least or 0, tensor.dim() + 1)
        for rank in sorted({r + step for r in edges for step in (-1, 0, 1) if r + step >= 1}):
            shape = tensor.shape[-rank:] if rank <= tensor.dim() else (1,) * (rank - tensor.dim()) + tensor.shape
            yield f"{self.name} rank {rank}", tensor.replace(shape=shape)


class Dim(TensorConstraint):
    """The sizes of some dimensions of a tensor lie in ``[at_least, at_most]`` and are multiples of ``multiple_of``.

    Args:
        name: the tensor argument.
        dims: which dimensions, as torch counts them. A dimension that the tensor does not have meets the constraint.
        at_least: smallest size, or None.
        at_most: largest size, or None.
        multiple_of: the size is divisible by this, or None.
        fix: what to do where a size is not accepted; "": to pad it, or to split the tensor.

    >>> from fusedops.constraints import Dim
    >>> Dim("x", (-2, -1), at_least=32, at_most=4096, multiple_of=32).describe()
    'x: dim -2 and -1 a multiple of 32 in [32, 4096]'
    """

    code = ReasonCode.SIZE

    def __init__(
        self,
        name: str,
        dims: tuple[int, ...],
        at_least: int | None = None,
        at_most: int | None = None,
        multiple_of: int | None = None,
        fix: str = "",
    ) -> None:
        super().__init__(name)
        self.fix = fix
        self.dims = integers("Dim", name, dims)
        self.at_least = integer("Dim", name, at_least)
        self.at_most = integer("Dim", name, at_most)
        self.multiple_of = integer("Dim", name, multiple_of)
        if not dims or at_least is at_most is multiple_of is None:
            raise ValueError(f"Dim({name!r}): expected dims, and at_least, at_most or multiple_of; to fix: give them")
        if multiple_of is not None and multiple_of < 1:
            raise ValueError(f"Dim({name!r}): got multiple_of={multiple_of}, expected at least 1; to fix: give that")

    def expression(self, constants: dict[str, object]) -> str:
        tests: list[str] = []
        for dim in self.dims:
            size = f"{self.name}.shape[{dim}]"
            low = f"{self.at_least} <= " if self.at_least is not None else ""
            high = f" <= {self.at_most}" if self.at_most is not None else ""
            parts = [f"{low}{size}{high}"] if low or high else []
            if self.multiple_of is not None:
                parts.append(f"{size} % {self.multiple_of} == 0")
            rank = dim + 1 if dim >= 0 else -dim
            tests.append(f"({self.name}.dim() < {rank} or ({' and '.join(parts)}))")
        return " and ".join(tests)

    def reasons(self, args: Arguments) -> list[Reason]:
        tensor = args[self.name]
        if tensor is None or self.accepts(tensor):
            return []
        sizes = [(dim, int(tensor.shape[dim])) for dim in self._refused(tensor)]
        return [
            Reason(self.code, f"dim {dim} of {self.name} = {size}", self._sizes(), self._fix(dim, size))
            for dim, size in sizes
        ]

    def accepts(self, tensor: Any) -> bool:
        return not self._refused(tensor)

    def _refused(self, tensor: Any) -> list[int]:
        """Return the dims whose size is not accepted; without int(...), which would tie a graph to one size."""
        return [dim for dim in self.dims if has_dim(tensor, dim) and not self._fits(tensor.shape[dim])]

    def _fits(self, size: int) -> bool:
        return (
            (self.at_least is None or possible(size >= self.at_least))
            and (self.at_most is None or possible(size <= self.at_most))
            and (self.multiple_of is None or possible(size % self.multiple_of == 0))
        )

    def _sizes(self) -> str:
        kind = "a size" if self.multiple_of is None else f"a multiple of {self.multiple_of}"
        if self.at_least is not None and self.at_most is not None:
            return f"{kind} in [{self.at_least}, {self.at_most}]"
        if self.at_least is not None:
            return f"{kind} of at least {self.at_least}"
        return kind if self.at_most is None else f"{kind} of at most {self.at_most}"

    def _fix(self, dim: int, size: int) -> str:
        if self.fix:
            return self.fix
        step = self.multiple_of or 1
        padded = -(-max(size, self.at_least or 0) // step) * step
        if self.at_most is not None and padded > self.at_most:
            return f"split {self.name} so that dim {dim} is at most {self.at_most // step * step}"
        return f"pad dim {dim} of {self.name} from {size} to {padded}"

    def rule(self) -> str:
        return f"dim {listed(self.dims, 'and')} {self._sizes()}"

    def values(self, tensor: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        step = self.multiple_of or 1
        low = self.at_least if self.at_least is not None else step
        sizes = {low - 1, low, low + 1, low + step // 2}
        if self.at_most is not None:
            sizes |= {self.at_most - step, self.at_most, self.at_most + 1, self.at_most + step}
        for dim in (dim for dim in self.dims if has_dim(tensor, dim)):
            for size in sorted(size for size in sizes if size >= 0):
                yield f"{self.name} dim {dim} = {size}", resized(tensor, dim, size)


def integers(kind: str, name: str, values: Any) -> tuple[int, ...]:
    """Return ``values`` as a tuple; ValueError unless each is exactly an int: they become part of compiled source."""
    if not isinstance(values, (tuple, list)) or any(type(value) is not int for value in values):  # pyright: ignore
        raise ValueError(f"{kind}({name!r}): got {values!r}, expected a tuple of ints; to fix: write it like (-2, -1)")
    return tuple(values)  # pyright: ignore


def integer(kind: str, name: str, value: Any) -> int | None:
    """Return ``value``; ValueError unless it is None or exactly an int."""
    if value is not None and type(value) is not int:
        raise ValueError(f"{kind}({name!r}): got {value!r}, expected an int; to fix: convert it with int()")
    return value
