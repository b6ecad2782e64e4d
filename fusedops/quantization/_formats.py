"""The formats whose scales are a tensor of their own, as data: those of the Hub, by the layout of their rows."""

from __future__ import annotations

import torch

from fusedops._named_tuple import NamedTuple

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT4 = tuple(float(code - 8) for code in range(16))
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Scaled(NamedTuple):
    """A format with a tensor of scales. A row is K codes, one after another; a scale is that of a group of a row.

    Attributes:
        values: of the 16 codes of 4 bits; None for float8_e4m3fn.
        group: the weights of a scale along K; 0: as many as the shape of the scales gives.
        rows: of the weight that have one scale; 0: all.
        scales: the dtypes of the scales. Bytes are E8M0, or e4m3 where ``e4m3`` is True.
        e4m3: see there.
        global_scale: True where a float32 number divides the scales.
        zeros: True where a byte for each scale may be the code of 0, in place of 8.
        high_first: True where the high half of a byte is the first of its two codes.
        multiple: of which K is a multiple.

    >>> from fusedops.quantization import SCALED
    >>> SCALED["MXFP4"].group, SCALED["MXFP4"].bits
    (32, 4)
    """

    values: tuple[float, ...] | None
    group: int
    rows: int
    scales: tuple[torch.dtype, ...]
    e4m3: bool
    global_scale: bool
    zeros: bool
    high_first: bool
    multiple: int

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return 8 if self.values is None else 4

    def scales_shape(self, outputs: int, columns: int, groups: int = 0) -> tuple[int, int]:
        """Return the shape of the scales of (outputs, columns) weights; ``groups``: of a row, where they give it."""
        across = groups or 1 if not self.group else -(-columns // self.group)
        return (1 if not self.rows else -(-outputs // self.rows), across)


def _scaled(
    values: tuple[float, ...] | None, group: int, rows: int = 1, *scales: torch.dtype, multiple: int = 0, **flags: bool
) -> Scaled:
    found = {"e4m3": False, "global_scale": False, "zeros": False, "high_first": False, **flags}
    return Scaled(values, group, rows, scales or FLOATS, **found, multiple=multiple or group or 1)


_BYTES = torch.uint8
#: The formats by name. A Packed of "GPTQ", "GPTQ_V2" or "AWQ" becomes one of "INT4_GROUP".
SCALED = {
    "MXFP4": _scaled(E2M1, 32, 1, _BYTES),
    "NVFP4": _scaled(E2M1, 16, 1, _BYTES, e4m3=True, global_scale=True),
    "FP8_BLOCK": _scaled(None, 128, 128, *FLOATS, _BYTES, multiple=1),
    "FP8_ROW": _scaled(None, 0, 1),
    "FP8_TENSOR": _scaled(None, 0, 0),
    "FP4_GROUP32": _scaled(E2M1, 32, 1, *FLOATS, _BYTES),
    "INT4_GROUP": _scaled(INT4, 0, 1, zeros=True, multiple=8),
    "NF4": _scaled(NF4, 64, 1, high_first=True),
}
