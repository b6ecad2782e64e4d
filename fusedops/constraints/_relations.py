"""Constraints on a tensor beside another one: its shape, its dtype and its device."""

from __future__ import annotations

from collections.abc import Iterator

from fusedops._contract.constraint import Arguments, Boundary, Constraint, constant, plain
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._report.reason import Reason, ReasonCode
from fusedops.constraints._dtypes import FLOATING


def broadcasts(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    """Return True where a tensor of shape ``small`` broadcasts to ``large`` without changing ``large``.

    >>> from fusedops.constraints import broadcasts
    >>> broadcasts((5, 1), (3, 5, 6)), broadcasts((2, 6), (3, 5, 6))
    (True, False)
    """
    missing = len(large) - len(small)
    if missing < 0:
        return False
    # compare whole shapes only where ranks are equal: (6,) == (batch, 5, 6) would tie a traced call to batch != 6
    if missing == 0 and small == large:
        return True
    # a loop over reversed(): all(...) and a slice cost 0.7 us more
    for size, full in zip(reversed(small), reversed(large)):
        if size != full and size != 1:
            return False
    return True


class _Beside(Constraint):
    """A constraint that compares a tensor with another one.

    Args:
        name: the tensor argument.
        other: the tensor that it is compared with.
    """

    def __init__(self, name: str, other: str) -> None:
        super().__init__(name)
        self.other = Constraint(other).name  # checked the same way

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.other)

    def _specs(self, args: Arguments) -> tuple[TensorSpec, TensorSpec] | None:
        tensor, other = args[self.name], args[self.other]
        return None if tensor is None or other is None else (tensor, other)


class Broadcasts(_Beside):
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
        tensors = self._specs(args)
        if tensors is None or broadcasts(tensors[0].shape, tensors[1].shape):
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
        tensors = self._specs(args)
        if tensors is None:
            return
        spec, shape = tensors[0], tensors[1].shape
        shapes = {shape, (1, *shape), shape[1:], shape[:-1]}
        shapes |= {(*shape[:dim], 1, *shape[dim + 1 :]) for dim in range(len(shape))}
        shapes |= {(*shape[:dim], shape[dim] + 1, *shape[dim + 1 :]) for dim in range(len(shape))}
        for other in sorted(shapes):
            changed = {**args, self.name: spec.replace(shape=other)}
            yield Boundary(f"{self.name} {other}", changed, broadcasts(other, shape))


class SameShape(_Beside):
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
        tensors = self._specs(args)
        if tensors is None or tensors[0].shape == tensors[1].shape:
            return []
        small, large = (tuple(tensor.shape) for tensor in tensors)
        needed = f"the shape of {self.other}, {large}"
        return [Reason(self.code, f"{self.name} of shape {small}", needed, "expand the smaller one to it")]

    def describe(self) -> str:
        return f"{self.name}: the shape of {self.other}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        tensors = self._specs(args)
        if tensors is None:
            return
        shape = tensors[1].shape
        for other in (shape, (1, *shape), (*shape[:-1], shape[-1] + 1) if shape else (2,)):
            yield Boundary(f"{self.name} {other}", {**args, self.name: tensors[0].replace(shape=other)}, other == shape)


class SameDType(_Beside):
    """The tensor has the dtype of ``other``.

    >>> from fusedops.constraints import SameDType
    >>> SameDType("cos", "q").describe()
    'cos: the dtype of q'
    """

    code = ReasonCode.DTYPE

    def expression(self, constants: dict[str, object]) -> str:
        return f"{self.name}.dtype is {self.other}.dtype"

    def reasons(self, args: Arguments) -> list[Reason]:
        tensors = self._specs(args)
        if tensors is None or tensors[0].dtype == tensors[1].dtype:
            return []
        dtype, wanted = plain(tensors[0].dtype), plain(tensors[1].dtype)
        needed = f"the dtype of {self.other}, {wanted}"
        fix = f"convert it, as in {self.name}.to({self.other}.dtype)"
        return [Reason(self.code, f"{self.name} of {dtype}", needed, fix)]

    def describe(self) -> str:
        return f"{self.name}: the dtype of {self.other}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        tensors = self._specs(args)
        if tensors is None:
            return
        for dtype in FLOATING:
            changed = {**args, self.name: tensors[0].replace(dtype=dtype)}
            yield Boundary(f"{self.name} {plain(dtype)}", changed, dtype == tensors[1].dtype)


class Packed(_Beside):
    """The tensor holds two of equal size in its last dim, which is even, where ``other`` is None.

    >>> from fusedops.constraints import Packed
    >>> Packed("gate", "up").describe()
    'gate: an even last dim where up is None'
    """

    code = ReasonCode.SIZE

    def expression(self, constants: dict[str, object]) -> str:
        return f"{self.other} is not None or ({self.name}.dim() > 0 and {self.name}.shape[-1] % 2 == 0)"

    def reasons(self, args: Arguments) -> list[Reason]:
        tensor: TensorSpec | None = args[self.name]
        if tensor is None or args[self.other] is not None or _is_even(tensor.shape):
            return []
        given = f"{self.name} of shape {tuple(tensor.shape)} and no {self.other}"
        needed = f"an even last dim, which holds {self.name} and {self.other}"
        return [Reason(self.code, given, needed, f"pass {self.other}, or pack it into {self.name}")]

    def describe(self) -> str:
        return f"{self.name}: an even last dim where {self.other} is None"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        spec: TensorSpec | None = args[self.name]
        if spec is None or args[self.other] is not None:
            return
        for shape in ((), *((*spec.shape[:-1], size) for size in (0, 1, 2, 7, 8))):
            yield Boundary(f"{self.name} {shape}", {**args, self.name: spec.replace(shape=shape)}, _is_even(shape))


def _is_even(shape: tuple[int, ...]) -> bool:
    return len(shape) > 0 and shape[-1] % 2 == 0


class SameDevice(_Beside):
    """The tensor is on the device of ``other``.

    >>> from fusedops.constraints import SameDevice
    >>> SameDevice("mask", "x").describe()
    'mask: on the device of x'
    """

    code = ReasonCode.DEVICE

    def expression(self, constants: dict[str, object]) -> str:
        return f"{self.name}.device == {self.other}.device"

    def reasons(self, args: Arguments) -> list[Reason]:
        tensors = self._specs(args)
        if tensors is None or tensors[0].device == tensors[1].device:
            return []
        tensor, other = tensors
        given = f"{self.name} on {tensor.device} and {self.other} on {other.device}"
        return [Reason(self.code, given, "one device", f"move it with {self.name}.to({self.other}.device)")]

    def describe(self) -> str:
        return f"{self.name}: on the device of {self.other}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        tensors = self._specs(args)
        if tensors is not None:
            changed = {**args, self.name: tensors[0].replace(device="meta")}
            yield Boundary(f"{self.name} on meta", changed, tensors[1].device == "meta")
