"""Packed weights: formats of GGUF files and of the Hub, which have 4 to 8 bits for each weight, and rows of int8.

:class:`Packed` is a weight of any format, as :func:`pack` makes it and checkpoints have it; :func:`unpack` returns its
numbers.

A packed weight of GGUF is also a uint8 tensor (..., bytes of a row), whose rows are blocks one after another, exactly
as a GGUF file stores them. :func:`dequantize` returns the value of each weight as the package ``gguf`` does, bit for
bit, and so does :func:`quantize` for the formats that ``gguf`` can write.

"INT8" is :func:`quantize_rows` of each row, K of int8 and then the scale, float32. Its layers round the activation to
8 bits too (:func:`fusedops.int8_linear`), those of the formats of GGUF do not.

>>> import torch, fusedops
>>> packed = fusedops.quantization.quantize(torch.linspace(-1, 1, 64).view(2, 32), "Q8_0")
>>> packed.shape, packed.dtype
(torch.Size([2, 34]), torch.uint8)
>>> fusedops.quantization.dequantize(packed, "Q8_0")[0, :3]
tensor([-0.9999, -0.9684, -0.9370])
"""

from fusedops.quantization import _blocks
from fusedops.quantization._blocks import INT8 as INT8
from fusedops.quantization._blocks import LAYER_FORMATS as LAYER_FORMATS
from fusedops.quantization._blocks import Format as Format
from fusedops.quantization._blocks import beyond_range as beyond_range
from fusedops.quantization._blocks import block_of as block_of
from fusedops.quantization._blocks import bytes_of_row as bytes_of_row
from fusedops.quantization._blocks import dequantize as dequantize
from fusedops.quantization._blocks import int8_parts as int8_parts
from fusedops.quantization._blocks import quantize as quantize
from fusedops.quantization._blocks import quantize_rows as quantize_rows
from fusedops.quantization._blocks import rounded_rows as rounded_rows
from fusedops.quantization._blocks import weights_of_row as weights_of_row
from fusedops.quantization._formats import SCALED as SCALED
from fusedops.quantization._packed import PACKED_FORMATS as PACKED_FORMATS
from fusedops.quantization._packed import Packed as Packed
from fusedops.quantization._packed import check_parts as check_parts
from fusedops.quantization._packed import chunks as chunks
from fusedops.quantization._packed import pack as pack
from fusedops.quantization._packed import unpack as unpack

#: The formats by name, each with the sizes of its block.
FORMATS = _blocks.FORMATS

__all__ = ["FORMATS", "Format", "Packed", "bytes_of_row", "dequantize", "pack", "quantize", "quantize_rows", "unpack"]
