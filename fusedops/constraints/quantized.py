"""The constraints on a packed weight: whole blocks of its format, and the tensors beside its codes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fusedops._contract.constraint import Arguments, Boundary, Constraint, constant, listed, plain, shown
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._report.reason import Reason, ReasonCode
from fusedops.constraints.tensors import TensorConstraint, possible
from fusedops.quantization import FORMATS, SCALED, block_of, bytes_of_row, weights_of_row
from fusedops.quantization._formats import FLOATS

_KNOWN = (*FORMATS, *SCALED)


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
    options: tuple[str, ...] = ()  # more parameters, from which a subclass has the number of weights

    def __init__(self, name: str, other: str, format: str) -> None:
        super().__init__(name)
        self.other, self.format = Constraint(other).name, Constraint(format).name
        self.rebuilds = self.other
        self.formats = tuple((key, sizes.weights, sizes.bytes) for key, sizes in FORMATS.items())
        self.scaled = tuple((key, each.multiple, each.bits) for key, each in SCALED.items())

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.other, self.format, *self.options)

    def columns(self, other: Any, *options: Any) -> Any:
        """Return the number of weights of a row."""
        return other.shape[-1]

    def columns_given(self, columns: int) -> str:
        """Return the number of weights of a row, as the caller gave it."""
        return f"dim -1 of {self.other} = {columns}"

    def expression(self, constants: dict[str, object]) -> str:
        return f"{constant(constants, _fits)}({self.name}.shape, {self.other}.shape[-1], {self.format})"

    def accepts(self, packed: Any, other: Any, format: Any, *options: Any) -> bool:
        if format not in _KNOWN or not packed.dim() or not other.dim():
            return True
        return _fits(packed.shape, self.columns(other, *options), format)

    def rule(self) -> str:
        return f"rows of whole blocks, for the last dim of {self.other}"

    def given(self, packed: Any, other: Any, format: Any, *options: Any) -> str:
        columns = self.columns(other, *options)
        return self.columns_given(columns) if columns % block_of(format) else super().given(packed)

    def needed(self, packed: Any, other: Any, format: Any, *options: Any) -> str:
        columns = self.columns(other, *options)
        if columns % block_of(format):
            return f"a multiple of {block_of(format)}, the block of {format}"
        return f"rows of {bytes_of_row(columns, format)} bytes, {columns} weights of {format}"

    def fix_of(self, packed: Any, other: Any, format: Any, *options: Any) -> str:
        if self.columns(other, *options) % block_of(format):
            return "use another format or an unpacked weight"
        return f"pass fusedops.quantization.{'pack' if format in SCALED else 'quantize'}(weight, {shown(format)})"

    def follow(self, args: Arguments) -> TensorSpec | None:
        values = self.arguments(args)
        if values is None or values[2] not in _KNOWN or not values[1].dim():
            return None
        packed, other, format, *options = values
        columns = self.columns(other, *options) // block_of(format) * block_of(format)
        return packed.replace(shape=(*packed.shape[:-1], bytes_of_row(columns, format)))

    def rebuilt(self, args: Arguments, like: TensorSpec) -> TensorSpec:
        packed, format = args[self.name], args[self.format]
        known = format in _KNOWN and packed.dim() > 0
        columns = weights_of_row(packed.shape[-1], format) if known else 0
        return like.replace(shape=(*like.shape[:-1], columns))

    def values(self, packed: TensorSpec, *others: Any) -> Iterator[tuple[str, TensorSpec]]:
        right = self.follow(dict(zip(self.names, (packed, *others))))
        if right is not None:
            shape = right.shape
            yield from self.shaped(packed, (shape, (*shape[:-1], shape[-1] + 1), (*shape[:-1], shape[-1] + 34)))


def _fits(packed: tuple[int, ...], columns: int, format: str) -> bool:
    """Return True if a row has as many bytes as its weights take, or may have for sizes that depend on data."""
    if format in SCALED:
        multiple, per_byte = SCALED[format].multiple, 8 // SCALED[format].bits
        return possible(columns % multiple == 0) and possible(packed[-1] == columns // per_byte)
    sizes = FORMATS[format]
    if not possible(columns % sizes.weights == 0):
        return False
    return possible(packed[-1] == columns // sizes.weights * sizes.bytes)


class PackedPart(Constraint):
    """A tensor beside the codes of a packed weight: of the shape and dtype of its format, or None where it has none.

    Args:
        name: the tensor argument.
        packed: the codes, (..., N, bytes of a row).
        format: the parameter that has the format.
        part: ``scales``, ``global_scale`` or ``zeros``, as a :class:`fusedops.quantization.Packed` has them. None: the
            name is one of these.

    >>> import fusedops, torch
    >>> from fusedops.constraints import PackedPart
    >>> args = {"packed": fusedops.TensorSpec((8, 32), torch.uint8), "scales": None, "format": "MXFP4"}
    >>> PackedPart("scales", "packed", "format").reasons(args)[0].needed
    'uint8 of shape (8, 2), those of MXFP4'
    """

    code = ReasonCode.SIZE
    none_is_met = False
    reads_shapes = True

    def __init__(self, name: str, packed: str, format: str, part: str | None = None) -> None:
        super().__init__(name)
        self.packed, self.format = Constraint(packed).name, Constraint(format).name
        fields = {"scales": True, "global_scale": "global_scale", "zeros": "zeros"}
        self.part = part = part or name
        if part not in fields:
            raise ValueError(f"PackedPart: got {part!r}, expected one of {', '.join(fields)}; to fix: write one")
        of = (key for key, each in SCALED.items() if fields[part] is True or getattr(each, part))
        self.formats = tuple(of)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.packed, self.format)

    def expression(self, constants: dict[str, object]) -> str:
        formats, fits = constant(constants, frozenset(self.formats)), constant(constants, self._accepts)
        args = f"{self.name}, {self.packed}, {self.format}"
        return f"({fits}({args}) if {self.format} in {formats} else {self.name} is None)"

    def _accepts(self, part: Any, packed: Any, format: str) -> bool:
        if part is None:
            return self.part == "zeros"
        if part.is_nested or part.layout is not torch.strided:
            return False
        if packed.dim() < 2:
            return True  # another constraint refuses it
        dtypes, shape = self._wanted(part, packed, format)
        same = len(shape) == part.dim() and all(possible(a == b) for a, b in zip(part.shape, shape))
        return part.dtype in dtypes and same

    def _wanted(self, part: Any, packed: Any, format: str) -> tuple[tuple[torch.dtype, ...], tuple[int, ...]]:
        """Return the dtypes and the shape of the part."""
        data = SCALED[format]
        *lead, outputs, size = packed.shape
        if self.part == "global_scale":
            return FLOATS, tuple(lead)
        columns, groups = weights_of_row(size, format), 0
        if not data.group and data.zeros:
            given = part.shape[-1] if part is not None and part.dim() == packed.dim() else 1
            # groups of at least 8 weights, so that a byte has codes of one
            groups = given if given and columns % (8 * given) == 0 else 1
        if self.part == "zeros":
            return (torch.uint8,), (*lead, *data.scales_shape(outputs, columns, groups))
        return data.scales, (*lead, *data.scales_shape(outputs, columns, groups))

    def reasons(self, args: Arguments) -> list[Reason]:
        part, packed, format = (args[name] for name in self.names)
        if format not in self.formats:
            if part is None:
                return []
            return [Reason(self.code, f"a {self.name} with {shown(format)}", f"no {self.name}", "leave it out")]
        if self._accepts(part, packed, format):
            return []
        if part is not None and (part.is_nested or part.layout is not torch.strided):
            fix = f"pass fusedops.quantization.pack(weight, {shown(format)})"
            return [Reason(ReasonCode.LAYOUT, f"{self.name} that is not strided", "a strided tensor", fix)]
        dtypes, shape = self._wanted(part, packed, format)
        given = (
            f"{self.name} = None"
            if part is None
            else f"{self.name} of {plain(part.dtype)} and shape {tuple(part.shape)}"
        )
        needed = f"{listed([plain(each) for each in dtypes])} of shape {tuple(shape)}, those of {format}"
        return [Reason(self.code, given, needed, f"pass fusedops.quantization.pack(weight, {shown(format)})")]

    def describe(self) -> str:
        return f"{self.name}: those of {listed(self.formats)}, else None"

    def follow(self, args: Arguments) -> TensorSpec | None:
        part, packed, format = (args.get(name) for name in self.names)
        absent = format not in self.formats or (part is None and self.part == "zeros")
        if absent or format is None or packed is None or packed.dim() < 2:
            return None
        dtypes, shape = self._wanted(part, packed, format)
        dtype = part.dtype if part is not None and part.dtype in dtypes else dtypes[0]
        return packed.replace(shape=tuple(shape), dtype=dtype)

    def fitted(self, args: Arguments) -> Any:
        return self.follow(args)

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        right = self.follow(args)
        for label, value in ((f"no {self.name}", None), (f"the {self.name} of the format", right)):
            changed = {**args, self.name: value}
            yield Boundary(label, changed, not self.reasons(changed))
        if right is not None:
            wrong = right.replace(shape=(*right.shape, 1))
            yield Boundary(f"{self.name} {wrong.shape}", {**args, self.name: wrong}, False)


class ScaleGroups(TensorConstraint):
    """Rows, and the columns of a scale, are a multiple of so many columns; met where scales are no tensor of their own.

    Args:
        name: the codes, (N, bytes of a row).
        scales: the tensor of scales.
        format: the parameter that has the format.
        multiple: the number of columns.
        zeros: the parameter that has the zeros.

    >>> import fusedops, torch
    >>> from fusedops.constraints import ScaleGroups
    >>> codes, scales = fusedops.TensorSpec((8, 24), torch.uint8), fusedops.TensorSpec((8, 2))
    >>> args = {"packed": codes, "scales": scales, "format": "INT4_GROUP"}
    >>> ScaleGroups("packed", "scales", "format", 32).reasons(args)[0].given
    'rows of 48 columns'
    """

    code = ReasonCode.SIZE
    reads_shapes = True

    def __init__(self, name: str, scales: str, format: str, multiple: int, zeros: str = "zeros") -> None:
        super().__init__(name)
        self.scales, self.format, self.multiple = Constraint(scales).name, Constraint(format).name, multiple
        self.zeros = zeros

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.scales, self.format)

    def expression(self, constants: dict[str, object]) -> str:
        fits = constant(constants, self.accepts)
        return f"({self.scales} is None or {fits}({self.name}, {self.scales}, {self.format}))"

    def accepts(self, packed: Any, scales: Any, format: Any) -> bool:
        if scales is None or format not in SCALED:
            return True
        return possible(self._size(packed, scales, format)[1] % self.multiple == 0)

    def _size(self, packed: Any, scales: Any, format: str) -> tuple[str, Any]:
        """Return what decides: the columns of a row, or of a group where the row is a multiple."""
        columns = weights_of_row(packed.shape[-1], format)
        if not possible(columns % self.multiple == 0) or not SCALED[format].zeros:
            return "rows", columns
        return "groups", columns // max(scales.shape[-1], 1)

    def rule(self) -> str:
        return f"rows, and groups of a scale, of a multiple of {self.multiple} columns"

    def given(self, packed: Any, scales: Any, format: str) -> str:
        return "{} of {} columns".format(*self._size(packed, scales, format))

    def needed(self, packed: Any, scales: Any, format: str) -> str:
        return f"a multiple of {self.multiple}"

    def fix_of(self, packed: Any, scales: Any, format: str) -> str:
        what = self._size(packed, scales, format)[0]
        return f"pass {what} of a multiple of {self.multiple} columns, or leave the call to eager"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        """Yield calls with groups of half of the columns, and of all."""
        scales: TensorSpec | None = args[self.scales]
        if scales is None or args[self.format] not in SCALED:
            return
        for groups in (scales.shape[-1], args[self.name].shape[-1] * 2 // (self.multiple // 2)):
            changed = {**args, self.scales: scales.replace(shape=(*scales.shape[:-1], groups))}
            if args.get(self.zeros) is not None:
                changed[self.zeros] = args[self.zeros].replace(shape=changed[self.scales].shape)
            yield Boundary(f"{groups} groups", changed, not self.reasons(changed))
