"""Constraints on a tensor beside another one: its shape, its dtype and its device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fusedops._contract.constraint import Arguments, Boundary, Constraint, constant, plain
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._report.reason import Reason, ReasonCode
from fusedops.constraints._dtypes import FLOATING
from fusedops.constraints._symbolic import possible


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


def _fits(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    """Return what :func:`broadcasts` returns; for sizes that depend on data, False only where it is certain."""
    if len(small) > len(large):
        return False
    # each size by itself: one that depends on data must not decide about the others
    pairs = zip(reversed(small), reversed(large))
    return all(possible(size == full) or possible(size == 1) for size, full in pairs)


def same_shape(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return True for two equal shapes. Sizes that depend on data are compared when the graph runs."""
    return len(shape) == len(other) and all(possible(size == full) for size, full in zip(shape, other))


class Beside(Constraint):
    """A constraint that compares a tensor with another one.

    Args:
        name: the tensor argument.
        other: the tensor that it is compared with.
    """

    reads_metadata_only = True

    def __init__(self, name: str, other: str) -> None:
        super().__init__(name)
        self.other = Constraint(other).name  # checked the same way

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.other)

    def specs(self, args: Arguments) -> tuple[TensorSpec, TensorSpec] | None:
        tensor, other = args[self.name], args[self.other]
        return None if tensor is None or other is None else (tensor, other)


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

    def reasons(self, args: Arguments) -> list[Reason]:
        tensors = self.specs(args)
        if tensors is None or _fits(tensors[0].shape, tensors[1].shape):
            return []
        small, large = (tuple(tensor.shape) for tensor in tensors)
        needed = f"a shape that broadcasts to {self.other} {large}: each size, from the last, 1 or {self.other}'s"
        fix = f"give {self.name} sizes of 1 where it repeats"
        if len(small) == 2 and len(large) == 4 and small == (large[0], large[3]):
            fix = f"pass {self.name}[:, None, None, :]"
        return [Reason(self.code, f"{self.name} of shape {small}", needed, fix)]

    def describe(self) -> str:
        return f"{self.name}: broadcasts to {self.other}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        tensors = self.specs(args)
        if tensors is None:
            return
        spec, shape = tensors[0], tensors[1].shape
        shapes = {shape, (1, *shape), shape[1:], shape[:-1]}
        shapes |= {(*shape[:dim], 1, *shape[dim + 1 :]) for dim in range(len(shape))}
        shapes |= {(*shape[:dim], shape[dim] + 1, *shape[dim + 1 :]) for dim in range(len(shape))}
        for other in sorted(shapes):
            changed = {**args, self.name: spec.replace(shape=other)}
            yield Boundary(f"{self.name} {other}", changed, broadcasts(other, shape))

    def examples(self, args: Arguments) -> Mapping[str, Any]:
        tensors = self.specs(args)
        if tensors is None:
            return {}
        spec, shape = tensors[0], tuple(tensors[1].shape)
        even = tuple(1 if at % 2 else size for at, size in enumerate(shape))
        odd = tuple(size if at % 2 else 1 for at, size in enumerate(shape))
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
        # at a low rank some of the forms are the same shape
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

    def reasons(self, args: Arguments) -> list[Reason]:
        tensors = self.specs(args)
        if tensors is None or same_shape(tensors[0].shape, tensors[1].shape):
            return []
        small, large = (tuple(tensor.shape) for tensor in tensors)
        needed = f"the shape of {self.other}, {large}"
        return [Reason(self.code, f"{self.name} of shape {small}", needed, "expand the smaller one to it")]

    def describe(self) -> str:
        return f"{self.name}: the shape of {self.other}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        tensors = self.specs(args)
        if tensors is None:
            return
        shape = tensors[1].shape
        for other in (shape, (1, *shape), (*shape[:-1], shape[-1] + 1) if shape else (2,)):
            yield Boundary(f"{self.name} {other}", {**args, self.name: tensors[0].replace(shape=other)}, other == shape)


class SameDType(Beside):
    """The tensor has the dtype of ``other``.

    >>> from fusedops.constraints import SameDType
    >>> SameDType("cos", "q").describe()
    'cos: the dtype of q'
    """

    code = ReasonCode.DTYPE

    def expression(self, constants: dict[str, object]) -> str:
        return f"{self.name}.dtype is {self.other}.dtype"

    def reasons(self, args: Arguments) -> list[Reason]:
        tensors = self.specs(args)
        if tensors is None or tensors[0].dtype == tensors[1].dtype:
            return []
        dtype, wanted = plain(tensors[0].dtype), plain(tensors[1].dtype)
        needed = f"the dtype of {self.other}, {wanted}"
        fix = f"convert it, as in {self.name}.to({self.other}.dtype)"
        return [Reason(self.code, f"{self.name} of {dtype}", needed, fix)]

    def describe(self) -> str:
        return f"{self.name}: the dtype of {self.other}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        tensors = self.specs(args)
        if tensors is None:
            return
        for dtype in FLOATING:
            changed = {**args, self.name: tensors[0].replace(dtype=dtype)}
            yield Boundary(f"{self.name} {plain(dtype)}", changed, dtype == tensors[1].dtype)


class SameDevice(Beside):
    """The tensor is on the device of ``other``.

    >>> from fusedops.constraints import SameDevice
    >>> SameDevice("mask", "x").describe()
    'mask: on the device of x'
    """

    code = ReasonCode.DEVICE

    def expression(self, constants: dict[str, object]) -> str:
        # two devices made and compared take 0.08 us more than two flags
        flags = f"{self.name}.is_cpu and {self.other}.is_cpu"
        return f"({flags}) or {self.name}.device == {self.other}.device"

    def reasons(self, args: Arguments) -> list[Reason]:
        tensors = self.specs(args)
        if tensors is None or tensors[0].device == tensors[1].device:
            return []
        tensor, other = tensors
        given = f"{self.name} on {tensor.device} and {self.other} on {other.device}"
        return [Reason(self.code, given, "one device", f"move it with {self.name}.to({self.other}.device)")]

    def describe(self) -> str:
        return f"{self.name}: on the device of {self.other}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        tensors = self.specs(args)
        if tensors is not None:
            changed = {**args, self.name: tensors[0].replace(device="meta")}
            yield Boundary(f"{self.name} on meta", changed, tensors[1].device == "meta")
