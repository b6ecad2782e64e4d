"""A packed weight as a value: its format, its tensors and its shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops.errors import InvalidInputError
from fusedops.quantization._blocks import FORMATS, block_of, bytes_of_row, dequantize, quantize, weights_of_row
from fusedops.quantization._formats import FLOATS, SCALED

#: The formats that a Packed is made of, and those that it keeps: GPTQ, GPTQ_V2 and AWQ are turned to rows.
BY_COLUMNS = ("GPTQ", "GPTQ_V2", "AWQ")
PACKED_FORMATS = (*FORMATS, *SCALED, *BY_COLUMNS)
_CHUNK = 2**20  # weights that are unpacked at a time
_NAMES: tuple[str, ...] = ("codes", "scales", "global_scale", "zeros")
_E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)


class Packed:
    """A packed weight: codes, their scales, and a format. It is no tensor, and has no gradient.

    The tensors are those of the Hub, as views by row: codes are uint8 (..., N, bytes of a row), scales (..., N, groups)
    or fewer rows, those of E8M0 or e4m3 as uint8. "GPTQ", "GPTQ_V2" and "AWQ" have their codes by column: they are
    copied to rows, and ``format`` is then "INT4_GROUP", whose weights are the same.

    Args:
        format: see :data:`PACKED_FORMATS`: a format of GGUF, or one of the Hub.
        codes: of the weights. GGUF: uint8 (..., N, bytes of a row). "MXFP4": uint8 (..., N, K / 2), or
            (..., N, K / 32, 16), as ``*_blocks`` has them. "NVFP4": uint8 (..., N, K / 2). "FP8_BLOCK", "FP8_ROW",
            "FP8_TENSOR": float8_e4m3fn (..., N, K). "FP4_GROUP32": int8 (..., N, K / 2). "INT4_GROUP": int32
            (..., N, K / 8). "GPTQ", "GPTQ_V2": int32 (K / 8, N). "AWQ": int32 (K, N / 8). "NF4": uint8, N * K / 2.
        scales: of the groups. "MXFP4": uint8 (..., N, K / 32). "NVFP4": float8_e4m3fn (..., N, K / 16). "FP8_BLOCK":
            floating or E8M0, one of each 128 * 128, the last ones of fewer. "FP8_ROW": floating (..., N, 1).
            "FP8_TENSOR": one. "FP4_GROUP32": floating or E8M0 (..., N, K / 32). "INT4_GROUP": floating (..., N, G).
            "GPTQ", "AWQ": floating (G, N). "NF4": float32, N * K / 64.
        global_scale: of "NVFP4", a number that divides the scales, one for each expert.
        zeros: codes of 0, of "INT4_GROUP": int32 (N / 8, G), or bytes (..., N, G); "GPTQ", "AWQ": int32 (G, N / 8).
            None: 8.
        shape: of the weight, (N, K), or (E, N, K) for experts; K is a multiple of the group.

    Raises:
        InvalidInputError: a tensor has another shape or dtype than its format.

    Source: transformers, ``integrations/mxfp4.py``, ``finegrained_fp8.py``; compressed-tensors; gguf; bitsandbytes.

    >>> import torch, fusedops
    >>> codes, scales = torch.full((3, 32), 0x21, dtype=torch.uint8), torch.full((3, 2), 128, dtype=torch.uint8)
    >>> packed = fusedops.quantization.Packed("MXFP4", codes, scales, shape=(3, 64))
    >>> packed, fusedops.quantization.unpack(packed)[0, :2]
    (Packed(MXFP4, shape=(3, 64), 102 bytes), tensor([1., 2.]))
    """

    def __init__(
        self,
        format: str,
        codes: Tensor,
        scales: Tensor | None = None,
        global_scale: Tensor | None = None,
        zeros: Tensor | None = None,
        *,
        shape: tuple[int, ...],
    ) -> None:
        self.shape = tuple(shape)
        _check_shape(format, self.shape)
        check_parts("Packed", format, self.shape, dict(zip(_NAMES, (codes, scales, global_scale, zeros))))
        if format in BY_COLUMNS:
            from fusedops.quantization._by_columns import to_rows

            codes, scales, zeros = to_rows(format, codes, scales, zeros, self.shape)  # pyright: ignore[reportArgumentType]
            format = "INT4_GROUP"
        else:
            codes, scales, global_scale, zeros = _by_rows(format, self.shape, codes, scales, global_scale, zeros)
        self.format = format
        self.codes, self.scales, self.global_scale, self.zeros = codes, scales, global_scale, zeros

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(each.nbytes for each in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that there are by name: codes, scales, global_scale, zeros."""
        every = zip(_NAMES, (self.codes, self.scales, self.global_scale, self.zeros))
        return {name: each for name, each in every if each is not None}

    def to(self, device: Any) -> Packed:
        """Return the weight on a device; its dtypes stay."""
        return self._with({name: each.to(device) for name, each in self.tensors().items()}, self.shape)

    def __getitem__(self, expert: int) -> Packed:
        """Return the weight of one expert, (N, K), of (E, N, K): views."""
        return self._with({name: each[expert] for name, each in self.tensors().items()}, self.shape[1:])

    def _with(self, tensors: dict[str, Tensor], shape: tuple[int, ...]) -> Packed:
        made = object.__new__(Packed)
        made.format, made.shape = self.format, shape
        made.codes, made.scales, made.global_scale, made.zeros = (tensors.get(name) for name in _NAMES)  # pyright: ignore[reportAttributeAccessIssue]
        return made

    def __reduce__(self) -> Any:
        return _rebuilt, (self.format, self.tensors(), self.shape)

    def __repr__(self) -> str:
        return f"Packed({self.format}, shape={self.shape}, {self.nbytes:,} bytes)"


def _rebuilt(format: str, tensors: dict[str, Tensor], shape: tuple[int, ...]) -> Packed:
    return Packed(format, **tensors, shape=shape)


def pack(weight: Tensor, format: str, *, group: int = 128, symmetric: bool = True) -> Packed:
    """Pack a weight in a format.

    Formats of GGUF as :func:`quantize` packs them. Others round each weight to the nearest number of its group, whose
    scale follows from the largest magnitude in it.

    Args:
        weight: (N, K) or (E, N, K), float16, bfloat16, float32 or float64, finite.
        format: one of :data:`PACKED_FORMATS`, except those by column, whose weights "INT4_GROUP" has.
        group: the weights of a scale of "INT4_GROUP", a multiple of 8 that divides K.
        symmetric: of "INT4_GROUP", True for the code 8 as 0; False for another one in each group.

    Returns:
        The packed weight, on the device of ``weight``.

    Raises:
        InvalidInputError: an argument is not as above, or K is no multiple of the group.

    Source: gguf, ``gguf.quants.quantize``; bitsandbytes, ``quantize_4bit``; NVIDIA, "Introducing NVFP4" (2025).

    >>> import torch, fusedops
    >>> fusedops.quantization.pack(torch.ones(3, 64), "MXFP4")
    Packed(MXFP4, shape=(3, 64), 102 bytes)
    """
    if format in BY_COLUMNS:
        raise InvalidInputError(
            f"pack: got format = {format!r}, expected one by row; to fix: pass 'INT4_GROUP', whose weights are the same"
        )
    shape = tuple(weight.shape)
    if not weight.is_floating_point():
        raise InvalidInputError(
            f"pack: got a weight of {weight.dtype}, expected floating numbers; to fix: pass layer.weight"
        )
    _check_shape(format, shape)
    if format in FORMATS:
        return Packed(format, quantize(weight, format), shape=shape)
    if not bool(weight.detach().isfinite().all()):
        raise InvalidInputError(
            "pack: got a weight with inf or NaN, expected finite numbers; to fix: replace them, as with "
            "weight.nan_to_num()"
        )
    from fusedops.quantization import _scaled

    wide = weight.detach().float()
    zeros = divisor = None
    if format == "MXFP4":
        codes, scales = _scaled.mxfp4(wide)
    elif format == "NVFP4":
        codes, scales, divisor = _scaled.nvfp4(wide)
    elif format == "FP4_GROUP32":
        codes, scales = _scaled.fp4_group32(wide)
    elif format == "NF4":
        codes, scales = _scaled.nf4(wide)
    elif format == "INT4_GROUP":
        if group <= 0 or group % 8 or shape[-1] % group:
            raise InvalidInputError(
                f"pack: got group = {group} for rows of {shape[-1]} weights, expected a multiple of 8 that divides "
                f"them; to fix: pass group=32, or leave the weight as it is"
            )
        plain, scales, zeros = _scaled.int4_group(wide, group, symmetric)
        codes = _scaled.in_pairs(plain)
    else:
        codes, scales = _scaled.fp8(wide, format)
    return Packed(format, codes, scales, divisor, zeros, shape=shape)


def unpack(packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weights of a packed one: each code's number times its scale, in float32, rounded to a dtype.

    Args:
        packed: the weight.
        dtype: of the result.

    Returns:
        (N, K) or (E, N, K), on the device of the tensors, as the package of the format has them in float32.

    Raises:
        InvalidInputError: ``packed`` is no Packed.

    Source: as of :class:`Packed`.

    >>> import torch, fusedops
    >>> fusedops.quantization.unpack(fusedops.quantization.pack(torch.eye(32), "FP8_ROW"))[0, :2]
    tensor([1., 0.])
    """
    if not isinstance(packed, Packed):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidInputError(
            f"unpack: got {type(packed).__name__}, expected a Packed; to fix: pass what pack returned, or use "
            f"dequantize(packed, format) for bytes of GGUF"
        )
    result = torch.empty(packed.shape, dtype=dtype, device=packed.device)
    lead = packed.shape[:-2]
    for at in range(prod(lead)):
        one, out = (packed[at], result[at]) if lead else (packed, result)
        for rows, weight in chunks(one.format, one.codes, one.scales, one.global_scale, one.zeros):
            out[rows] = weight
    return result


def chunks(
    format: str, codes: Tensor, scales: Tensor | None, global_scale: Tensor | None, zeros: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of rows of a weight (N, K) in float32, each of some 2**20 numbers, which are 4 MiB.

    Args:
        format: of the weight, by row.
        codes: uint8, (N, bytes of a row).
        scales: those of a :class:`Packed`, or None for a format of GGUF.
        global_scale: likewise.
        zeros: likewise.

    >>> import torch
    >>> from fusedops.quantization import chunks, pack
    >>> packed = pack(torch.eye(64), "MXFP4")
    >>> [(rows, weight.shape) for rows, weight in chunks("MXFP4", packed.codes, packed.scales, None, None)][:1]
    [(slice(0, 16, None), torch.Size([16, 64]))]
    """
    columns = weights_of_row(codes.shape[-1], format)
    # a quarter of the weight at most, and not less than 16 rows
    step = max(16, min(_CHUNK // columns, -(-codes.shape[0] // 4))) if columns else max(codes.shape[0], 1)
    for start in range(0, codes.shape[0], step):
        rows = slice(start, min(start + step, codes.shape[0]))
        if scales is None:
            yield rows, dequantize(codes[rows], format)
        else:
            from fusedops.quantization._scaled import unpack_rows

            yield rows, unpack_rows(format, codes, scales, global_scale, zeros, rows.start, rows.stop)


def _check_shape(format: str, shape: tuple[int, ...]) -> None:
    if format not in PACKED_FORMATS:
        raise InvalidInputError(
            f"Packed: got format = {format!r}, expected one of {', '.join(PACKED_FORMATS)}; to fix: pass one of these"
        )
    if len(shape) not in (2, 3) or (format in BY_COLUMNS and len(shape) != 2):
        raise InvalidInputError(
            f"Packed: got shape = {shape}, expected (N, K){'' if format in BY_COLUMNS else ' or (E, N, K)'}; to fix: "
            f"pass the shape of the unpacked weight"
        )
    block = 8 if format in BY_COLUMNS else block_of(format)
    if shape[-1] % block:
        raise InvalidInputError(
            f"Packed: got shape = {shape}, expected a last dim that is a multiple of {block}, the block of {format}; "
            f"to fix: use another format, or leave the weight as it is"
        )


_Expected = dict[str, tuple[tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]]


def _expected(format: str, shape: tuple[int, ...], scales: Tensor | None) -> _Expected:
    """Return the shapes and dtypes that each tensor may have, without those that it must not have."""
    *lead, outputs, columns = shape
    one, size = tuple(lead), prod(shape)
    if format in FORMATS:
        return {"codes": (((*one, outputs, bytes_of_row(columns, format) or 0),), (torch.uint8,))}
    data = SCALED[format]
    of_codes = [(*one, outputs, columns * data.bits // 8)]
    dtypes: tuple[torch.dtype, ...] = (torch.uint8,)
    if data.bits == 8:
        dtypes = (torch.float8_e4m3fn, *dtypes)
    elif format == "FP4_GROUP32":
        dtypes = (torch.int8, *dtypes)
    elif format == "MXFP4":
        of_codes.append((*one, outputs, columns // 32, 16))
    elif format == "INT4_GROUP":
        words = (*one, outputs, columns // 8)
        return {
            "codes": ((words, *of_codes), (torch.int32, torch.uint8)),
            "scales": (((*one, outputs, _groups(columns, scales, -1)),), FLOATS),
            "zeros": (_zeros_shapes(one, outputs, _groups(columns, scales, -1)), (torch.int32, torch.uint8)),
        }
    elif format == "NF4":
        of_codes += [(size // 2, 1), (size // 2,)]
    groups = data.scales_shape(outputs, columns)
    of_scales = [(*one, *groups)]
    if groups[1] == 1:
        of_scales += [(*one, groups[0])] + ([one] if groups[0] == 1 else [])
    if format == "NF4":
        of_scales += [(size // 64,)]
    of_dtypes = tuple(_E8M0 if each is torch.uint8 else each for each in data.scales)
    of_dtypes = (torch.float8_e4m3fn, torch.uint8) if data.e4m3 else (*data.scales, *of_dtypes)
    found: _Expected = {
        "codes": (tuple(of_codes), dtypes),
        "scales": (tuple(of_scales), tuple(dict.fromkeys(of_dtypes))),
    }
    if data.global_scale:
        found["global_scale"] = ((one, (*one, 1), (*one, 1, 1)), FLOATS)
    return found


def _zeros_shapes(lead: tuple[int, ...], outputs: int, groups: int) -> tuple[tuple[int, ...], ...]:
    return ((*lead, -(-outputs // 8), groups), (*lead, outputs, groups))


def _expected_by_columns(format: str, shape: tuple[int, ...], scales: Tensor | None) -> _Expected:
    outputs, columns = shape
    groups = _groups(columns, scales, 0)
    codes = (columns, -(-outputs // 8)) if format == "AWQ" else (columns // 8, outputs)
    zeros = (groups, -(-outputs // 8))
    return {
        "codes": ((codes,), (torch.int32,)),
        "scales": (((groups, outputs),), FLOATS),
        "zeros": ((zeros,), (torch.int32,)),
    }


def _groups(columns: int, scales: Tensor | None, dim: int) -> int:
    """Return the groups of a row by the shape of the scales; 1 where these are no groups of a multiple of 8."""
    count = 1 if scales is None or scales.dim() < 2 else scales.shape[dim]
    return count if count and columns % (8 * count) == 0 else 1


def check_parts(
    owner: str,
    format: str,
    shape: tuple[int, ...],
    given: Mapping[str, Tensor | None],
    names: Mapping[str, str] | None = None,
    fix: str = "",
) -> None:
    """Raise for the first tensor that is not one of a format and a shape; they may be on the meta device.

    Args:
        owner: the function that is given the tensors.
        format: of the weight.
        shape: of the weight, whose block divides the last dim.
        given: the tensors by the names of a :class:`Packed`; None where there is none.
        names: those of the tensors in the error, where they have others.
        fix: of the error; empty: to pass the tensors of the checkpoint.

    Raises:
        InvalidInputError: a tensor is missing, or has another shape, dtype or device.

    >>> import torch
    >>> from fusedops.quantization import check_parts
    >>> check_parts("load", "FP8_TENSOR", (2, 3), {"codes": torch.zeros(2, 3, dtype=torch.uint8)})
    Traceback (most recent call last):
    fusedops.errors.InvalidInputError: load: got scales = None, expected a tensor of shape (1, 1), which FP8_TENSOR ...
    """
    expected = (_expected_by_columns if format in BY_COLUMNS else _expected)(format, shape, given.get("scales"))
    for part in _NAMES:
        name, tensor = (names or {}).get(part, part), given.get(part)
        if part not in expected:
            if tensor is not None:
                raise InvalidInputError(
                    f"{owner}: got {name} for {format}, expected None, since it has none; "
                    f"to fix: {fix or 'leave it out'}"
                )
            continue
        shapes, dtypes = expected[part]
        if tensor is None:
            if part == "zeros" and format == "INT4_GROUP":
                continue
            raise InvalidInputError(
                f"{owner}: got {name} = None, expected a tensor of shape {shapes[0]}, which {format} has; "
                f"to fix: {fix or f'pass the {name} of the checkpoint'}"
            )
        if tuple(tensor.shape) not in shapes or tensor.dtype not in dtypes:
            wanted = ", ".join(str(each).removeprefix("torch.") for each in dtypes)
            raise InvalidInputError(
                f"{owner}: got {name} of {str(tensor.dtype).removeprefix('torch.')} and shape {tuple(tensor.shape)}, "
                f"expected {wanted} and shape {' or '.join(map(str, shapes))}, those of {format}; "
                f"to fix: {fix or f'pass the {name} of the checkpoint, with the shape of its weight'}"
            )
    devices = {name: each.device for name, each in given.items() if each is not None}
    if len(set(devices.values())) > 1:
        raise InvalidInputError(
            f"{owner}: got tensors on {', '.join(f'{d} ({n})' for n, d in devices.items())}, expected one device; to "
            f"fix: move them to the device of the codes"
        )


def _by_rows(
    format: str,
    shape: tuple[int, ...],
    codes: Tensor,
    scales: Tensor | None,
    global_scale: Tensor | None,
    zeros: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the tensors by row; views, where the given ones are contiguous."""
    codes = _bytes(codes)
    if scales is None:
        return codes, None, None, None
    data, (*lead, outputs, columns) = SCALED[format], shape
    codes = codes.reshape(*lead, outputs, columns * data.bits // 8)
    groups = data.scales_shape(outputs, columns, scales.shape[-1] if format == "INT4_GROUP" else 0)
    if scales.dtype not in FLOATS:
        scales = _bytes(scales)
    scales = scales.detach().reshape(*lead, *groups).contiguous()
    if global_scale is not None:
        global_scale = global_scale.detach().float().reshape(lead)
    if zeros is not None:
        from fusedops.quantization._by_columns import zeros_of_words

        zeros = zeros.contiguous() if zeros.dtype is torch.uint8 else zeros_of_words(zeros, outputs)
    return codes, scales, global_scale, zeros


def _bytes(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().contiguous()  # else each call would copy it
    return tensor if tensor.dtype is torch.uint8 else tensor.view(torch.uint8)
