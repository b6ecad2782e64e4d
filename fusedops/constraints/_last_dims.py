"""Constraints on the last or the leading dims of a tensor, beside another one."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fusedops._contract.constraint import Arguments, Boundary
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._report.reason import Reason, ReasonCode
from fusedops.constraints._relations import Beside, same_shape


class LastDims(Beside):
    """The shape of the tensor is that of the last ``count`` dimensions of ``other``, as a norm's weight (H,) is.

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
        # of tuples of two lengths Python compares the sizes first, which would tie a traced call to them
        return f"{self.name}.dim() == {self.count} and {self.name}.shape == {self.other}.shape[-{self.count} :]"

    def reasons(self, args: Arguments) -> list[Reason]:
        tensors = self.specs(args)
        if tensors is None or self._accepts(tensors[0].shape, tensors[1].shape):
            return []
        shape, needed = (tuple(sizes) for sizes in (tensors[0].shape, tensors[1].shape[-self.count :]))
        same_size = math.prod(shape) == math.prod(needed)
        fix = f"pass {self.name}.view{needed}" if same_size else f"pass a {self.name} of shape {needed}"
        return [Reason(self.code, f"{self.name} of shape {shape}", f"{self._rule()}, {needed}", fix)]

    def _accepts(self, shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
        return len(shape) == self.count and shape == other[-self.count :]

    def _rule(self) -> str:
        return f"the shape of the last {'dim' if self.count == 1 else f'{self.count} dims'} of {self.other}"

    def describe(self) -> str:
        return f"{self.name}: {self._rule()}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        tensors = self.specs(args)
        if tensors is None or tensors[1].dim() < self.count:
            return
        shape = tuple(tensors[1].shape[-self.count :])
        for other in sorted({shape, (1, *shape), (*shape[:-1], shape[-1] + 1), (*shape[:-1], 1)}):
            changed = {**args, self.name: tensors[0].replace(shape=other)}
            yield Boundary(f"{self.name} {other}", changed, other == shape)


class LeadingDims(Beside):
    """The shape of the tensor is that of ``other`` without its last dimension, as a target has one class for each row.

    >>> from fusedops.constraints import LeadingDims
    >>> LeadingDims("target", "logits").describe()
    'target: the shape of logits without its last dim'
    """

    code = ReasonCode.SIZE
    reads_shapes = True

    def expression(self, constants: dict[str, object]) -> str:
        # the ranks first: see LastDims
        return f"{self.name}.dim() == {self.other}.dim() - 1 and {self.name}.shape == {self.other}.shape[:-1]"

    def reasons(self, args: Arguments) -> list[Reason]:
        tensors = self.specs(args)
        if tensors is None:
            return []
        if tensors[1].dim() > 0 and same_shape(tensors[0].shape, tensors[1].shape[:-1]):
            return []
        shape, needed = tuple(tensors[0].shape), tuple(tensors[1].shape[:-1])
        fix = f"pass a {self.name} of shape {needed}"
        if shape == (needed[:1] + tuple(tensors[1].shape[2:])):
            fix = f"move the second dim of {self.other} to the end, as in {self.other}.movedim(1, -1)"
        elif math.prod(shape) == math.prod(needed):
            fix = f"pass {self.name}.view{needed}"
        given = f"{self.name} of shape {shape}"
        return [Reason(self.code, given, f"the shape of {self.other} without its last dim, {needed}", fix)]

    def describe(self) -> str:
        return f"{self.name}: the shape of {self.other} without its last dim"

    def follow(self, args: Arguments) -> TensorSpec | None:
        tensors = self.specs(args)
        return None if tensors is None else tensors[0].replace(shape=tuple(tensors[1].shape[:-1]))

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        tensors = self.specs(args)
        if tensors is None or tensors[1].dim() == 0:
            return
        shape = tuple(tensors[1].shape[:-1])
        for other in sorted(
            {shape, (1, *shape), tuple(tensors[1].shape), (*shape[:-1], shape[-1] + 1) if shape else (2,)}
        ):
            yield Boundary(f"{self.name} {other}", {**args, self.name: tensors[0].replace(shape=other)}, other == shape)


class Packed(Beside):
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
