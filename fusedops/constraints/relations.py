"""Constraints that compare a tensor with another one: its shape, its dtype and its device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fusedops._contract.constraint import Arguments, Constraint, constant, plain
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._report.reason import ReasonCode
from fusedops.constraints.dtypes import FLOATING
from fusedops.constraints.tensors import TensorConstraint, possible


def broadcasts(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    """Return True where a tensor of shape ``small`` broadcasts to ``large`` without changing ``large``.

    >>> from fusedops.constraints import broadcasts
    >>> broadcasts((5, 1), (3, 5, 6)), broadcasts((2, 6), (3, 5, 6))
    (True, False)
    """
    rank = len(small)
    missing = len(large) - rank
    if missing < 0:
        return False
    if rank == 1:  # the usual bias; the loop takes 0.1 us more
        return small[0] == large[-1] or small[0] == 1
    # compare whole shapes only where ranks are equal: (6,) == (batch, 5, 6) would tie a traced call to batch != 6
    if missing == 0 and small == large:
        return True
    # a loop over reversed(): all(...) and a slice cost 0.7 us more
    for size, full in zip(reversed(small), reversed(large)):
        if size != full and size != 1:
            return False
    return True


def may_broadcast(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    """Return the result of :func:`broadcasts`; for sizes that depend on data, False only if it is certain."""
    if len(small) > len(large):
        return False
    # each size by itself: one that depends on data must not decide for the others
    pairs = zip(reversed(small), reversed(large))
    return all(possible(size == full) or possible(size == 1) for size, full in pairs)


def same_shape(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return True for two equal shapes. Sizes that depend on data are compared when the graph runs."""
    return len(shape) == len(other) and all(possible(size == full) for size, full in zip(shape, other))


class Beside(TensorConstraint):
    """A template: a constraint that compares a tensor with another one. It is met if either is None.

    A subclass defines :meth:`accepts`, :meth:`rule`, :meth:`fix_of`, :meth:`values` and :meth:`expression`, as for
    :class:`TensorConstraint`. All but ``rule`` and ``expression`` take the tensor and the other one.

    Args:
        name: the tensor argument.
        other: the tensor that it is compared with.

    >>> import fusedops
    >>> from fusedops.constraints import Beside
    >>> class SameRank(Beside):
    ...     def expression(self, constants):
    ...         return f"{self.name}.dim() == {self.other}.dim()"
    ...     def accepts(self, tensor, other):
    ...         return tensor.dim() == other.dim()
    ...     def rule(self):
    ...         return f"the rank of {self.other}"
    ...     def fix_of(self, tensor, other):
    ...         return f"view {self.name} with {other.dim()} dims"
    ...     def values(self, tensor, other):
    ...         yield f"{self.name} as {self.other}", other
    ...         yield f"{self.name} 0-d", tensor.replace(shape=())
    >>> args = {"mask": fusedops.TensorSpec((3,)), "x": fusedops.TensorSpec((2, 3))}
    >>> print(SameRank("mask", "x").reasons(args)[0])
    got mask of shape (3,), expected the rank of x; to fix: view mask with 2 dims
    """

    def __init__(self, name: str, other: str) -> None:
        super().__init__(name)
        self.other = Constraint(other).name  # checked the same way

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.other)

    def arguments(self, args: Arguments) -> tuple[Any, ...] | None:
        return None if args[self.other] is None else super().arguments(args)


class Broadcasts(Beside):
    """The tensor broadcasts to ``other``: each size, counted from the last, is 1 or the other's.

    >>> from fusedops.constraints import Broadcasts
    >>> Broadcasts("mask", "x").describe()
    'mask: broadcasts to x'
    """

    code = ReasonCode.SIZE
    reads_shapes = True

    def expression(self, constants: dict[str, object]) -> str:
        return f"{constant(constants, broadcasts)}({self.name}.shape, {self.other}.shape)"

    def accepts(self, tensor: Any, other: Any) -> bool:
        return may_broadcast(tensor.shape, other.shape)

    def rule(self) -> str:
        return f"broadcasts to {self.other}"

    def needed(self, tensor: Any, other: Any) -> str:
        sizes = f"each size, from the last, 1 or {self.other}'s"
        return f"a shape that broadcasts to {self.other} {tuple(other.shape)}: {sizes}"

    def fix_of(self, tensor: Any, other: Any) -> str:
        small, large = tuple(tensor.shape), tuple(other.shape)
        if len(small) == 2 and len(large) == 4 and small == (large[0], large[3]):
            return f"pass {self.name}[:, None, None, :]"
        return f"give {self.name} sizes of 1 where it repeats"

    def values(self, tensor: TensorSpec, other: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        shape = other.shape
        shapes = {shape, (1, *shape), shape[1:], shape[:-1]}
        shapes |= {(*shape[:dim], 1, *shape[dim + 1 :]) for dim in range(len(shape))}
        shapes |= {(*shape[:dim], shape[dim] + 1, *shape[dim + 1 :]) for dim in range(len(shape))}
        return self.shaped(tensor, sorted(shapes))

    def examples(self, args: Arguments) -> Mapping[str, Any]:
        values = self.arguments(args)
        if values is None:
            return {}
        spec, shape = values[0], tuple(values[1].shape)
        even = tuple(1 if dim % 2 else size for dim, size in enumerate(shape))
        odd = tuple(size if dim % 2 else 1 for dim, size in enumerate(shape))
        forms = {
            "of every size": shape,
            "of the last size": shape[-1:],
            "of one column": (*shape[:-1], 1)[: len(shape)],
            "of one row": (*shape[:-2], 1, *shape[-1:])[-len(shape) :] if shape else (),
            "of even dims": even,
            "of odd dims": odd,
            "of one element": (1,)[: len(shape)],
            "0-d": (),
        }
        # at a low rank some forms have the same shape
        distinct = {form: label for label, form in reversed(forms.items())}
        return {f"{self.name} {label}": spec.replace(shape=form) for form, label in distinct.items()}


class SameShape(Beside):
    """The tensor has the shape of ``other``.

    >>> from fusedops.constraints import SameShape
    >>> SameShape("residual", "x").describe()
    'residual: the shape of x'
    """

    code = ReasonCode.SIZE
    reads_shapes = True

    def expression(self, constants: dict[str, object]) -> str:
        return f"{self.name}.shape == {self.other}.shape"

    def accepts(self, tensor: Any, other: Any) -> bool:
        return same_shape(tensor.shape, other.shape)

    def rule(self) -> str:
        return f"the shape of {self.other}"

    def needed(self, tensor: Any, other: Any) -> str:
        return f"{self.rule()}, {tuple(other.shape)}"

    def fix_of(self, tensor: Any, other: Any) -> str:
        return "expand the smaller one to it"

    def values(self, tensor: TensorSpec, other: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        shape = other.shape
        return self.shaped(tensor, (shape, (1, *shape), (*shape[:-1], shape[-1] + 1) if shape else (2,)))


class SameDType(Beside):
    """The tensor has the dtype of ``other``.

    >>> from fusedops.constraints import SameDType
    >>> SameDType("cos", "q").describe()
    'cos: the dtype of q'
    """

    code = ReasonCode.DTYPE

    def expression(self, constants: dict[str, object]) -> str:
        return f"{self.name}.dtype is {self.other}.dtype"

    def accepts(self, tensor: Any, other: Any) -> bool:
        return tensor.dtype == other.dtype

    def rule(self) -> str:
        return f"the dtype of {self.other}"

    def given(self, tensor: Any, other: Any) -> str:
        return f"{self.name} of {plain(tensor.dtype)}"

    def needed(self, tensor: Any, other: Any) -> str:
        return f"{self.rule()}, {plain(other.dtype)}"

    def fix_of(self, tensor: Any, other: Any) -> str:
        return f"convert it, as in {self.name}.to({self.other}.dtype)"

    def values(self, tensor: TensorSpec, other: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        for dtype in FLOATING:
            yield f"{self.name} {plain(dtype)}", tensor.replace(dtype=dtype)


class SameDevice(Beside):
    """The tensor is on the device of ``other``.

    >>> from fusedops.constraints import SameDevice
    >>> SameDevice("mask", "x").describe()
    'mask: on the device of x'
    """

    code = ReasonCode.DEVICE

    def expression(self, constants: dict[str, object]) -> str:
        # making and comparing two devices takes 0.08 us more than two flags
        flags = f"{self.name}.is_cpu and {self.other}.is_cpu"
        return f"({flags}) or {self.name}.device == {self.other}.device"

    def accepts(self, tensor: Any, other: Any) -> bool:
        return tensor.device == other.device

    def rule(self) -> str:
        return f"on the device of {self.other}"

    def given(self, tensor: Any, other: Any) -> str:
        return f"{self.name} on {tensor.device} and {self.other} on {other.device}"

    def needed(self, tensor: Any, other: Any) -> str:
        return "one device"

    def fix_of(self, tensor: Any, other: Any) -> str:
        return f"move it with {self.name}.to({self.other}.device)"

    def values(self, tensor: TensorSpec, other: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        yield f"{self.name} on meta", tensor.replace(device="meta")
