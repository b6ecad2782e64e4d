"""Constraints that compare the sizes of two tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from fusedops._contract.constraint import Arguments, listed
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._report.reason import Reason, ReasonCode
from fusedops.constraints.relations import Beside, same_shape
from fusedops.constraints.tensors import has_dim, integer, integers, possible, resized


class SameDims(Beside):
    """Some sizes of the tensor equal the sizes of ``other``.

    Args:
        name: the tensor argument.
        other: the tensor that it is compared with.
        dims: the dims of both, counted from the first.

    >>> from fusedops.constraints import SameDims
    >>> SameDims("k", "q", (0, 3)).describe()
    'k: dim 0 and 3 as in q'
    """

    code = ReasonCode.SIZE
    reads_shapes = True

    def __init__(self, name: str, other: str, dims: tuple[int, ...]) -> None:
        super().__init__(name, other)
        self.dims = integers("SameDims", name, dims)
        if not dims or min(dims) < 0:
            raise ValueError(f"SameDims({name!r}): got dims {dims!r}, expected some from 0; to fix: write (0, 3)")

    def expression(self, constants: dict[str, object]) -> str:
        return " and ".join(f"{self.name}.shape[{dim}] == {self.other}.shape[{dim}]" for dim in self.dims)

    def reasons(self, args: Arguments) -> list[Reason]:
        values = self.arguments(args)
        if values is None or self.accepts(*values):
            return []
        tensor, other = values
        return [
            Reason(
                self.code,
                f"dim {dim} of {self.name} = {tensor.shape[dim]}",
                f"that of {self.other}, {other.shape[dim]}",
                f"pass {self.name} and {self.other} with one size of dim {dim}",
            )
            for dim in self.dims
            if not possible(tensor.shape[dim] == other.shape[dim])
        ]

    def accepts(self, tensor: Any, other: Any) -> bool:
        if min(tensor.dim(), other.dim()) <= max(self.dims):
            return True
        return all(possible(tensor.shape[dim] == other.shape[dim]) for dim in self.dims)

    def rule(self) -> str:
        return f"dim {listed(self.dims, 'and')} as in {self.other}"

    def values(self, tensor: TensorSpec, other: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        yield f"{self.name} {tensor.shape}", tensor
        for dim in self.dims:
            size = tensor.shape[dim] + 1
            yield f"{self.name} dim {dim} = {size}", resized(tensor, dim, size)


class DimMultiple(Beside):
    """A size of the tensor is a multiple of the size of ``other``, at most ``at_most`` times it. 0 is a multiple of 0
    alone.

    Args:
        name: the tensor argument.
        other: the tensor that it is compared with.
        dim: the dim of both, counted from the first.
        at_most: the largest factor, or None. With 1 the sizes are equal.
        fix: the text of the fix, where the usual one is not enough.
        other_dim: the dim of ``other``, where it is another one.

    >>> from fusedops.constraints import DimMultiple
    >>> DimMultiple("q", "k", 1).describe()
    'q: dim 1 a multiple of that of k'
    """

    code = ReasonCode.SIZE
    reads_shapes = True

    def __init__(
        self,
        name: str,
        other: str,
        dim: int,
        at_most: int | None = None,
        fix: str = "",
        other_dim: int | None = None,
    ) -> None:
        super().__init__(name, other)
        self.dim, self.other_dim = integers("DimMultiple", name, (dim, dim if other_dim is None else other_dim))
        self.at_most, self.fix = at_most, fix
        if at_most is not None and (type(at_most) is not int or at_most < 1):
            raise ValueError(
                f"DimMultiple({name!r}): got at_most={at_most!r}, expected an int from 1; to fix: give one"
            )

    def expression(self, constants: dict[str, object]) -> str:
        size, other = f"{self.name}.shape[{self.dim}]", f"{self.other}.shape[{self.other_dim}]"
        if self.at_most == 1:
            return f"{size} == {other}"
        limit = "" if self.at_most is None else f" and {size} <= {self.at_most} * {other}"
        return f"({size} % {other} == 0{limit} if {other} else not {size})"

    def accepts(self, tensor: Any, other: Any) -> bool:
        if tensor.dim() <= self.dim or other.dim() <= self.other_dim:
            return True
        size, unit = tensor.shape[self.dim], other.shape[self.other_dim]
        if not possible(unit != 0):
            return possible(size == 0)
        return possible(size % unit == 0) and (self.at_most is None or possible(size <= self.at_most * unit))

    def rule(self) -> str:
        if self.at_most == 1:
            return f"dim {self.dim} as in {self.other}"
        limit = "" if self.at_most is None else f", at most {self.at_most} times it"
        of = "that" if self.other_dim == self.dim else f"dim {self.other_dim}"
        return f"dim {self.dim} a multiple of {of} of {self.other}{limit}"

    def given(self, tensor: Any, other: Any) -> str:
        return f"dim {self.dim} of {self.name} = {tensor.shape[self.dim]}"

    def needed(self, tensor: Any, other: Any) -> str:
        unit = other.shape[self.other_dim]
        if self.at_most == 1:
            return f"{unit}, as in {self.other}"
        limit = "" if self.at_most is None else f", at most {self.at_most} times as large"
        return f"a multiple of {unit}, as in {self.other}{limit}"

    def fix_of(self, tensor: Any, other: Any) -> str:
        return (
            self.fix or f"pass {self.other} with a size of dim {self.other_dim} that divides {tensor.shape[self.dim]}"
        )

    def values(self, tensor: TensorSpec, other: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        unit = other.shape[self.other_dim]
        factors = (1, 2, *((self.at_most, self.at_most + 1) if self.at_most else ()))
        for size in sorted({*(factor * unit for factor in factors), unit + 1}):
            yield f"{self.name} dim {self.dim} = {size}", resized(tensor, self.dim, size)


class NotLarger(Beside):
    """A size of the tensor is at most the size of ``other``.

    Args:
        name: the tensor argument.
        other: the tensor that it is compared with.
        dim: the dim of both, counted from the first.
        fix: the text of the fix, where the usual one is not enough.

    >>> from fusedops.constraints import NotLarger
    >>> NotLarger("v", "k", 3).describe()
    'v: dim 3 at most that of k'
    """

    code = ReasonCode.SIZE
    reads_shapes = True

    def __init__(self, name: str, other: str, dim: int, fix: str = "") -> None:
        super().__init__(name, other)
        (self.dim,) = integers("NotLarger", name, (dim,))
        self.fix = fix

    def expression(self, constants: dict[str, object]) -> str:
        return f"{self.name}.shape[{self.dim}] <= {self.other}.shape[{self.dim}]"

    def accepts(self, tensor: Any, other: Any) -> bool:
        return min(tensor.dim(), other.dim()) <= self.dim or possible(tensor.shape[self.dim] <= other.shape[self.dim])

    def rule(self) -> str:
        return f"dim {self.dim} at most that of {self.other}"

    def given(self, tensor: Any, other: Any) -> str:
        return f"dim {self.dim} of {self.name} = {tensor.shape[self.dim]}"

    def needed(self, tensor: Any, other: Any) -> str:
        return f"at most that of {self.other}, {other.shape[self.dim]}"

    def fix_of(self, tensor: Any, other: Any) -> str:
        return self.fix or f"pass {self.name} with a size of dim {self.dim} of at most {other.shape[self.dim]}"

    def values(self, tensor: TensorSpec, other: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        for size in (1, other.shape[self.dim], other.shape[self.dim] + 1):
            yield f"{self.name} dim {self.dim} = {size}", resized(tensor, self.dim, size)


class SameSize(Beside):
    """A dim of the tensor has the size of a dim of ``other``, as a matmul needs.

    Args:
        name: the tensor argument.
        dim: its dim, as torch counts them.
        other: the tensor that it is compared with.
        other_dim: the dim of ``other``. The constraint is met if either tensor lacks its dim.
        less: how much smaller the size is than that of ``other``.
        rebuilds: True where that dim is the last of the op's first tensor, which backward does not receive.

    >>> from fusedops.constraints import SameSize
    >>> SameSize("weight", -1, "x", -1).describe()
    'weight: dim -1 of the size of dim -1 of x'
    """

    code = ReasonCode.SIZE
    reads_shapes = True

    def __init__(self, name: str, dim: int, other: str, other_dim: int, rebuilds: bool = False, less: int = 0) -> None:
        super().__init__(name, other)
        self.less = less
        if rebuilds:
            self.rebuilds = other
        sizes = (integer("SameSize", name, dim), integer("SameSize", name, other_dim))
        if sizes[0] is None or sizes[1] is None:
            raise ValueError(f"SameSize({name!r}): got a dim of None, expected an int; to fix: give both dims")
        self.dim, self.other_dim = sizes[0], sizes[1]

    def expression(self, constants: dict[str, object]) -> str:
        ranks = [dim + 1 if dim >= 0 else -dim for dim in (self.dim, self.other_dim)]
        size = f"{self.other}.shape[{self.other_dim}]" + (f" - {self.less}" if self.less else "")
        return (
            f"{self.name}.dim() < {ranks[0]} or {self.other}.dim() < {ranks[1]} or "
            f"{self.name}.shape[{self.dim}] == {size}"
        )

    def accepts(self, tensor: Any, other: Any) -> bool:
        return not self._applies(tensor, other) or possible(tensor.shape[self.dim] == self._size(other))

    def _size(self, other: Any) -> Any:
        return other.shape[self.other_dim] - self.less if self.less else other.shape[self.other_dim]

    def _applies(self, tensor: Any, other: Any) -> bool:
        return has_dim(tensor, self.dim) and has_dim(other, self.other_dim)

    def rule(self) -> str:
        less = f", less {self.less}" if self.less else ""
        return f"dim {self.dim} of the size of dim {self.other_dim} of {self.other}{less}"

    def given(self, tensor: Any, other: Any) -> str:
        return f"{self.name} of shape {tuple(tensor.shape)} and {self.other} of {tuple(other.shape)}"

    def needed(self, tensor: Any, other: Any) -> str:
        return (
            f"{self.name} with {self.rule()}"
            if self.less
            else f"dim {self.dim} of {self.name} of the size of dim {self.other_dim} of {self.other}"
        )

    def fix_of(self, tensor: Any, other: Any) -> str:
        return f"pass {self.name} with a dim {self.dim} of {self._size(other)}"

    def follow(self, args: Arguments) -> TensorSpec | None:
        values = self.arguments(args)
        if values is None or not self._applies(*values):
            return None
        return resized(values[0], self.dim, self._size(values[1]))

    def rebuilt(self, args: Arguments, like: TensorSpec) -> TensorSpec:
        return like.replace(shape=(*like.shape[:-1], args[self.name].shape[self.dim]))

    def values(self, tensor: TensorSpec, other: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        if self._applies(tensor, other):
            size = self._size(other)
            for changed in (size, size + 1):
                yield f"{self.name} dim {self.dim} = {changed}", resized(tensor, self.dim, changed)


class LastDims(Beside):
    """The tensor has the shape of the last ``count`` dimensions of ``other``, as a norm's weight (H,) has.

    >>> from fusedops.constraints import LastDims
    >>> LastDims("weight", "x").describe()
    'weight: the shape of the last dim of x'
    """

    code = ReasonCode.SIZE
    reads_shapes = True

    def __init__(self, name: str, other: str, count: int = 1) -> None:
        super().__init__(name, other)
        if type(count) is not int or count < 1:
            raise ValueError(
                f"LastDims({name!r}): got count={count!r}, expected an int of at least 1; to fix: give one"
            )
        self.count = count

    def expression(self, constants: dict[str, object]) -> str:
        # the rank first: Python compares the sizes of shapes of different ranks, which would tie a traced call to them
        return f"{self.name}.dim() == {self.count} and {self.name}.shape == {self.other}.shape[-{self.count} :]"

    def accepts(self, tensor: Any, other: Any) -> bool:
        return tensor.dim() == self.count and tensor.shape == other.shape[-self.count :]

    def rule(self) -> str:
        return f"the shape of the last {'dim' if self.count == 1 else f'{self.count} dims'} of {self.other}"

    def needed(self, tensor: Any, other: Any) -> str:
        return f"{self.rule()}, {tuple(other.shape[-self.count :])}"

    def fix_of(self, tensor: Any, other: Any) -> str:
        shape = tuple(other.shape[-self.count :])
        return _with_shape(self.name, tensor, shape)

    def values(self, tensor: TensorSpec, other: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        if other.dim() < self.count:
            return iter(())
        shape = other.shape[-self.count :]
        shapes = {shape, (1, *shape), (*shape[:-1], shape[-1] + 1), (*shape[:-1], 1)}
        return self.shaped(tensor, sorted(shapes))


class CacheScale(Beside):
    """The tensor has a scale for each head of a cache (pages, size, heads, D), for each page and head, or each token.

    >>> from fusedops.constraints import CacheScale
    >>> CacheScale("k_scale", "k_cache").describe()
    'k_scale: (heads,), (pages, heads) or (pages, size, heads) of k_cache'
    """

    code = ReasonCode.SIZE
    reads_shapes = True

    def expression(self, constants: dict[str, object]) -> str:
        shape, whole = f"{self.name}.shape", f"{self.other}.shape"
        return (
            f"{self.name}.dim() == 1 and {shape} == {whole}[2:3] or {self.name}.dim() == 3 and {shape} == {whole}[:3] "
            f"or {self.name}.dim() == 2 and {shape}[0] == {whole}[0] and {shape}[1] == {whole}[2]"
        )

    def accepts(self, tensor: Any, other: Any) -> bool:
        return any(
            len(shape) == tensor.dim() and all(possible(size == wanted) for size, wanted in zip(tensor.shape, shape))
            for shape in self._shapes(other)
        )

    def rule(self) -> str:
        return f"(heads,), (pages, heads) or (pages, size, heads) of {self.other}"

    def needed(self, tensor: Any, other: Any) -> str:
        return f"a scale for each head, page or token, {' or '.join(map(str, self._shapes(other)))}"

    def fix_of(self, tensor: Any, other: Any) -> str:
        return f"pass one for each token, {self.name}.new_empty({self._shapes(other)[-1]})"

    def values(self, tensor: TensorSpec, other: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        shapes = self._shapes(other)
        return self.shaped(tensor, [*shapes, (*shapes[-1], 1), *((*shape[:-1], shape[-1] + 1) for shape in shapes)])

    def examples(self, args: Arguments) -> Mapping[str, Any]:
        values = self.arguments(args)
        if values is None:
            return {}
        return {
            f"{self.name} of {len(shape)} dims": values[0].replace(shape=shape) for shape in self._shapes(values[1])
        }

    def follow(self, args: Arguments) -> TensorSpec | None:
        values = self.arguments(args)
        if values is None or values[1].dim() != 4 or not 1 <= values[0].dim() <= 3:
            return None
        return values[0].replace(shape=self._shapes(values[1])[values[0].dim() - 1])

    @staticmethod
    def _shapes(other: Any) -> list[tuple[int, ...]]:
        pages, size, heads = (*other.shape, 0, 0, 0)[:3]
        return [(heads,), (pages, heads), (pages, size, heads)]


class LeadingDims(Beside):
    """The tensor has the shape of ``other`` without its last dimension, as a target with one class for each row has.

    >>> from fusedops.constraints import LeadingDims
    >>> LeadingDims("target", "logits").describe()
    'target: the shape of logits without its last dim'
    """

    code = ReasonCode.SIZE
    reads_shapes = True

    def expression(self, constants: dict[str, object]) -> str:
        # the rank first: see LastDims
        return f"{self.name}.dim() == {self.other}.dim() - 1 and {self.name}.shape == {self.other}.shape[:-1]"

    def accepts(self, tensor: Any, other: Any) -> bool:
        return other.dim() > 0 and same_shape(tensor.shape, other.shape[:-1])

    def rule(self) -> str:
        return f"the shape of {self.other} without its last dim"

    def needed(self, tensor: Any, other: Any) -> str:
        return f"{self.rule()}, {tuple(other.shape[:-1])}"

    def fix_of(self, tensor: Any, other: Any) -> str:
        shape = tuple(other.shape[:-1])
        if tuple(tensor.shape) == shape[:1] + tuple(other.shape[2:]):
            return f"move the second dim of {self.other} to the end, as in {self.other}.movedim(1, -1)"
        return _with_shape(self.name, tensor, shape)

    def follow(self, args: Arguments) -> TensorSpec | None:
        values = self.arguments(args)
        return None if values is None else values[0].replace(shape=tuple(values[1].shape[:-1]))

    def values(self, tensor: TensorSpec, other: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        if other.dim() == 0:
            return iter(())
        shape = other.shape[:-1]
        shapes = {shape, (1, *shape), other.shape, (*shape[:-1], shape[-1] + 1) if shape else (2,)}
        return self.shaped(tensor, sorted(shapes))


class Packed(Beside):
    """If ``other`` is None, the last dim is even: it holds both tensors, one after the other.

    >>> from fusedops.constraints import Packed
    >>> Packed("gate", "up").describe()
    'gate: an even last dim where up is None'
    """

    code = ReasonCode.SIZE

    def expression(self, constants: dict[str, object]) -> str:
        return f"{self.other} is not None or ({self.name}.dim() > 0 and {self.name}.shape[-1] % 2 == 0)"

    def arguments(self, args: Arguments) -> tuple[Any, ...] | None:
        return (args[self.name], None) if args[self.name] is not None and args[self.other] is None else None

    def accepts(self, tensor: Any, other: None) -> bool:
        return tensor.dim() > 0 and tensor.shape[-1] % 2 == 0

    def rule(self) -> str:
        return f"an even last dim where {self.other} is None"

    def given(self, tensor: Any, other: None) -> str:
        return f"{self.name} of shape {tuple(tensor.shape)} and no {self.other}"

    def needed(self, tensor: Any, other: None) -> str:
        return f"an even last dim, which holds {self.name} and {self.other}"

    def fix_of(self, tensor: Any, other: None) -> str:
        return f"pass {self.other}, or pack it into {self.name}"

    def values(self, tensor: TensorSpec, other: None) -> Iterator[tuple[str, TensorSpec]]:
        return self.shaped(tensor, [(), *((*tensor.shape[:-1], size) for size in (0, 1, 2, 7, 8))])


def _with_shape(name: str, tensor: Any, shape: tuple[int, ...]) -> str:
    """Return the fix for a tensor that needs another shape: a view, if the number of elements is equal."""
    return f"pass {name}.view{shape}" if tensor.numel() == prod(shape) else f"pass a {name} of shape {shape}"
