"""The constraint on a packed weight: whole blocks of its format, for the last dim of another tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fusedops._contract.constraint import Arguments, Constraint, constant, shown
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._report.reason import ReasonCode
from fusedops.constraints.tensors import TensorConstraint, possible
from fusedops.quantization import FORMATS


class PackedRows(TensorConstraint):
    """Each row of a packed weight has as many weights as ``other`` has in its last dim: a whole number of blocks.

    Args:
        name: the packed weight, (N, bytes of a row).
        other: the tensor whose last dim it is multiplied with.
        format: the parameter that has the format.

    >>> import fusedops, torch
    >>> from fusedops.constraints import PackedRows
    >>> packed, x = fusedops.TensorSpec((8, 36), torch.uint8), fusedops.TensorSpec((2, 65))
    >>> print(PackedRows("packed", "x", "format").reasons({"packed": packed, "x": x, "format": "Q4_0"})[0])
    got dim -1 of x = 65, expected a multiple of 32, the block of Q4_0; to fix: use another format or an unpacked weight
    """

    code = ReasonCode.SIZE
    reads_shapes = True

    def __init__(self, name: str, other: str, format: str) -> None:
        super().__init__(name)
        self.other, self.format = Constraint(other).name, Constraint(format).name
        self.rebuilds = self.other
        self.formats = tuple((key, sizes.weights, sizes.bytes) for key, sizes in FORMATS.items())

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.other, self.format)

    def expression(self, constants: dict[str, object]) -> str:
        return f"{constant(constants, _fits)}({self.name}.shape, {self.other}.shape, {self.format})"

    def accepts(self, packed: Any, other: Any, format: Any) -> bool:
        return format not in FORMATS or not packed.dim() or not other.dim() or _fits(packed.shape, other.shape, format)

    def rule(self) -> str:
        return f"rows of whole blocks, for the last dim of {self.other}"

    def given(self, packed: Any, other: Any, format: Any) -> str:
        if other.shape[-1] % FORMATS[format].weights:
            return f"dim -1 of {self.other} = {other.shape[-1]}"
        return f"{self.name} of shape {tuple(packed.shape)}"

    def needed(self, packed: Any, other: Any, format: Any) -> str:
        columns, sizes = other.shape[-1], FORMATS[format]
        if columns % sizes.weights:
            return f"a multiple of {sizes.weights}, the block of {format}"
        return f"rows of {columns // sizes.weights * sizes.bytes} bytes, {columns} weights of {format}"

    def fix_of(self, packed: Any, other: Any, format: Any) -> str:
        if other.shape[-1] % FORMATS[format].weights:
            return "use another format or an unpacked weight"
        return f"pass fusedops.quantization.quantize(weight, {shown(format)})"

    def follow(self, args: Arguments) -> TensorSpec | None:
        values = self.arguments(args)
        if values is None or values[2] not in FORMATS or not values[1].dim():
            return None
        packed, other, format = values
        sizes = FORMATS[format]
        return packed.replace(shape=(*packed.shape[:-1], other.shape[-1] // sizes.weights * sizes.bytes))

    def rebuilt(self, args: Arguments, like: TensorSpec) -> TensorSpec:
        packed, format = args[self.name], args[self.format]
        known = format in FORMATS and packed.dim() > 0
        columns = packed.shape[-1] // FORMATS[format].bytes * FORMATS[format].weights if known else 0
        return like.replace(shape=(*like.shape[:-1], columns))

    def values(self, packed: TensorSpec, other: TensorSpec, format: str) -> Iterator[tuple[str, TensorSpec]]:
        right = self.follow({self.name: packed, self.other: other, self.format: format})
        if right is not None:
            shape = right.shape
            yield from self.shaped(packed, (shape, (*shape[:-1], shape[-1] + 1), (*shape[:-1], shape[-1] + 34)))


def _fits(packed: tuple[int, ...], other: tuple[int, ...], format: str) -> bool:
    """Return True if a row has as many bytes as its weights take, or may have for sizes that depend on data."""
    sizes = FORMATS[format]
    if not possible(other[-1] % sizes.weights == 0):
        return False
    return possible(packed[-1] == other[-1] // sizes.weights * sizes.bytes)
