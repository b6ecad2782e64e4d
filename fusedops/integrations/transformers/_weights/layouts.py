"""The tensors of packed linear layers in checkpoints of the Hub, by ``quant_method``: their names, checks and values.

A layer is planned from the headers of the files: shapes and dtypes. Values that decide are read then too: the order of
columns, and the state of bitsandbytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fusedops.errors import InvalidInputError
from fusedops.quantization import SCALED, Packed, check_parts

FIX = "download it again, or load it by from_pretrained"
OTHER = "use another checkpoint, or load it by from_pretrained"
_BITSANDBYTES = "weight.quant_state.bitsandbytes__"
_STRATEGIES = {"tensor": "FP8_TENSOR", "channel": "FP8_ROW"}


class Stored(NamedTuple):
    """A tensor of a checkpoint: its name there, shape, dtype, and a function that reads it into memory of its own."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


class Layer(NamedTuple):
    """A linear layer of a model, (outputs, columns), and the tensors of the checkpoint after its name."""

    name: str
    shape: tuple[int, int]
    stored: dict[str, Stored]
    config: Mapping[str, Any]

    def key(self, leaf: str) -> str:
        """Return the name in the checkpoint of a tensor, which may be missing."""
        return self.stored[leaf].key if leaf in self.stored else f"{self.name}.{leaf}"


class Layout(NamedTuple):
    """The names of the tensors of a layer after its own; one that no format of it has is empty.

    Attributes:
        codes: of the codes, and so on, by the parts of a ``Packed``.
        order: the group of each column.
        format: the format of a layer, or a function that returns it.
    """

    format: str | Callable[[Layer], str]
    codes: str
    scales: str
    global_scale: str = ""
    zeros: str = ""
    order: str = ""

    @property
    def parts(self) -> dict[str, str]:
        """Return the names by the parts of a ``Packed``."""
        parts = {"codes": self.codes, "scales": self.scales, "global_scale": self.global_scale, "zeros": self.zeros}
        return {part: leaf for part, leaf in parts.items() if leaf}

    def format_of(self, layer: Layer) -> str:
        """Return the format of a layer."""
        return self.format if isinstance(self.format, str) else self.format(layer)


def invalid(got: str, expected: str, fix: str = FIX) -> InvalidInputError:
    """Return the error of a checkpoint.

    >>> invalid("a", "b", "c")
    InvalidInputError('from_packed: got a, expected b; to fix: c')
    """
    return InvalidInputError(f"from_packed: got {got}, expected {expected}; to fix: {fix}")


def _floats(layer: Layer, scales: str) -> str:
    """Return the format of float8 numbers by the shape of their scales."""
    shape = layer.stored[scales].shape if scales in layer.stored else ()
    if prod(shape) == 1:
        return "FP8_TENSOR"
    return "FP8_ROW" if shape in ((layer.shape[0],), (layer.shape[0], 1)) else "FP8_BLOCK"


def _check_blocks(layer: Layer, scales: str, block: Any) -> str:
    if list(block) != [128, 128]:
        raise invalid(f"{layer.key(scales)} of blocks of {tuple(block)}", "blocks of (128, 128)", OTHER)
    return "FP8_BLOCK"


def _fp8(layer: Layer) -> str:
    block = layer.config.get("weight_block_size", (128, 128))
    scales = "weight_scale_inv"
    return _floats(layer, scales) if block is None else _check_blocks(layer, scales, block)


def _compressed_floats(layer: Layer) -> str:
    groups: dict[str, Any] = layer.config.get("config_groups") or {}
    weights: list[dict[str, Any]] = [each.get("weights") or {} for each in groups.values()]
    if len(weights) != 1:  # which layer is of which group follows from the scales
        return _floats(layer, "weight_scale")
    strategy = str(weights[0].get("strategy"))
    if strategy == "block":
        return _check_blocks(layer, "weight_scale", weights[0].get("block_structure") or ())
    if strategy not in _STRATEGIES:
        raise invalid(f"{layer.key('weight_scale')} of strategy {strategy!r}", "tensor, channel or block", OTHER)
    return _STRATEGIES[strategy]


def _compressed(layer: Layer) -> str:
    codes = layer.stored.get("weight_packed")
    if codes is None or codes.dtype is not torch.uint8:
        return "INT4_GROUP"
    return "NVFP4" if "weight_global_scale" in layer.stored else "MXFP4"


def _gptq(layer: Layer) -> str:
    _check_bits(layer, layer.config.get("bits", 4))
    version = str(layer.config.get("checkpoint_format", "gptq"))
    if version not in ("gptq", "gptq_v2"):
        raise invalid(f"checkpoint_format = {version!r} for {layer.key('qweight')}", "'gptq' or 'gptq_v2'", OTHER)
    return version.upper()


def _awq(layer: Layer) -> str:
    _check_bits(layer, layer.config.get("bits", layer.config.get("w_bit", 4)))
    version = str(layer.config.get("version", "gemm")).lower()
    if version != "gemm":
        raise invalid(f"version = {version!r} for {layer.key('qweight')}", "'gemm'", OTHER)
    return "AWQ"


def _check_bits(layer: Layer, bits: Any) -> None:
    if bits != 4:
        raise invalid(f"bits = {bits} for {layer.key('qweight')}", "4", OTHER)


#: The layouts of a quant_method; the last of several is taken where the layer has the codes of none.
LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "fp8": (Layout(_fp8, "weight", "weight_scale_inv"),),
    "fbgemm_fp8": (Layout("FP8_ROW", "weight", "weight_scale"),),
    "compressed-tensors": (
        Layout(
            _compressed, "weight_packed", "weight_scale", "weight_global_scale", "weight_zero_point", "weight_g_idx"
        ),
        Layout(_compressed_floats, "weight", "weight_scale", zeros="weight_zero_point"),
    ),
    "gptq": (Layout(_gptq, "qweight", "scales", zeros="qzeros", order="g_idx"),),
    "awq": (Layout(_awq, "qweight", "scales", zeros="qzeros"),),
    "bitsandbytes": (Layout("NF4", "weight", "weight.absmax"),),
    "mxfp4": (),  # of experts alone
}
_OF_CODES = {torch.uint8, torch.int8, torch.int16, torch.int32}


def is_coded(dtype: torch.dtype) -> bool:
    """Return True for the dtype of codes, which stand for other numbers than their own.

    >>> is_coded(torch.float8_e4m3fn), is_coded(torch.float16)
    (True, False)
    """
    return dtype in _OF_CODES or (dtype.is_floating_point and dtype.itemsize == 1)


class Plan(NamedTuple):
    """A packed layer that is to be loaded: what a ``Packed`` is made of, and how its scales are read."""

    layer: Layer
    format: str
    parts: dict[str, str]
    scales: Callable[[], Tensor] | None

    def load(self) -> Packed:
        """Read the tensors, and return the weight."""
        tensors = {part: self.layer.stored[leaf].read() for part, leaf in self.parts.items() if part != "scales"}
        scales = self.layer.stored[self.parts["scales"]].read() if self.scales is None else self.scales()
        return Packed(self.format, scales=scales, shape=self.layer.shape, **tensors)


def planned(layer: Layer, method: str) -> Plan | None:
    """Return the plan of a layer, or None where the checkpoint has its weight unpacked.

    Raises:
        InvalidInputError: it is not one of a format, or its tensors contradict each other.

    >>> planned(Layer("lm_head", (2, 3), {}, {}), "awq")
    """
    layouts = LAYOUTS[method]
    names = {leaf for each in layouts for leaf in (*each.parts.values(), each.order) if leaf not in ("", "weight")}
    weight = layer.stored.get("weight")
    if not layouts or (not names & layer.stored.keys() and (weight is None or not is_coded(weight.dtype))):
        return None
    layout = next((each for each in layouts if each.codes in layer.stored), layouts[-1])
    if method == "bitsandbytes":
        return _of_bitsandbytes(layer, layout)
    plan = _checked(layer, layout.format_of(layer), layout.parts)
    _check_order(layer, plan, layout.order)
    if (shape := layer.stored.get("weight_shape")) is not None:
        numbers = cast("list[int]", shape.read().tolist())
        if tuple(numbers) != layer.shape:
            raise invalid(f"{shape.key} = {tuple(numbers)}", str(layer.shape))
    return plan


def _checked(layer: Layer, format: str, parts: dict[str, str], scales: Callable[[], Tensor] | None = None) -> Plan:
    """Return a plan whose tensors have the shapes and dtypes of a format."""
    block = 8 if format not in SCALED else SCALED[format].multiple
    if layer.shape[1] % block:
        raise invalid(
            f"{layer.key(parts['codes'])} with rows of {layer.shape[1]} weights",
            f"a multiple of {block}, the block of {format}",
            OTHER,
        )
    given: dict[str, Tensor | None] = {}
    for part, leaf in parts.items():
        stored = layer.stored.get(leaf)
        given[part] = None if stored is None else torch.empty(stored.shape, dtype=stored.dtype, device="meta")
    if scales is not None:  # they are computed
        given["scales"] = torch.empty(given["scales"].shape if given["scales"] is not None else (), device="meta")
    names = {part: layer.key(leaf) for part, leaf in parts.items()}
    check_parts("from_packed", format, layer.shape, given, names, FIX)
    return Plan(layer, format, {part: leaf for part, leaf in parts.items() if leaf in layer.stored}, scales)


def _check_order(layer: Layer, plan: Plan, leaf: str) -> None:
    """Raise where the groups of columns are not one after another."""
    stored = layer.stored.get(leaf)
    if stored is None:
        return
    order, columns = stored.read().long(), layer.shape[1]
    scales = layer.stored[plan.parts["scales"]].shape
    groups = scales[0] if plan.format in ("GPTQ", "GPTQ_V2") else scales[-1]
    wanted = torch.arange(columns) // (columns // groups)
    if order.shape != wanted.shape or not (torch.equal(order, wanted) or bool((order == -1).all())):
        raise invalid(
            f"{stored.key} whose columns are in another order (desc_act)",
            f"groups of {columns // groups} columns one after another",
            OTHER,
        )


def _of_bitsandbytes(layer: Layer, layout: Layout) -> Plan:
    """Return the plan of a layer of bitsandbytes, whose scales may be packed too."""
    state = next((each for leaf, each in layer.stored.items() if leaf.startswith(_BITSANDBYTES)), None)
    if state is None:
        raise invalid(f"{layer.key('weight')} without {layer.name}.{_BITSANDBYTES}nf4", "the state of its 4-bit codes")
    try:
        values = cast("dict[str, Any]", json.loads(bytes(cast("list[int]", state.read().tolist()))))
        kind, size, shape = values["quant_type"], int(values["blocksize"]), tuple(values["shape"])
        nested = (
            (int(values["nested_blocksize"]), float(values["nested_offset"])) if "nested_offset" in values else None
        )
    except (ValueError, KeyError, TypeError) as error:
        raise invalid(f"{state.key}, which cannot be read", "the JSON of bitsandbytes") from error
    if (kind, size, shape) != ("nf4", 64, layer.shape):
        raise invalid(
            f"{state.key} of {kind}, blocks of {size} and shape {shape}",
            f"nf4, blocks of 64 and shape {layer.shape}",
            OTHER,
        )
    table = layer.stored.get("weight.quant_map")
    if table is not None and not torch.equal(table.read().float(), torch.tensor(SCALED["NF4"].values)):
        raise invalid(f"{table.key} of other numbers", "the 16 numbers of nf4")
    if nested is None:
        return _checked(layer, layout.format_of(layer), layout.parts)
    size, offset = nested
    blocks = prod(layer.shape) // 64
    absmax = _of_shape(layer, "weight.absmax", blocks)
    outer = _of_shape(layer, "weight.nested_absmax", -(-blocks // size))
    code = _of_shape(layer, "weight.nested_quant_map", 256)

    def scales() -> Tensor:
        wide = outer.read().float().repeat_interleave(size)[:blocks]
        return code.read().float()[absmax.read().long()] * wide + offset

    return _checked(layer, layout.format_of(layer), layout.parts, scales)


def _of_shape(layer: Layer, leaf: str, count: int) -> Stored:
    stored = layer.stored.get(leaf)
    if stored is None or stored.shape != (count,):
        shown = "that is missing" if stored is None else f"of shape {stored.shape}"
        raise invalid(f"{layer.key(leaf)} {shown}", f"shape {(count,)}, of doubly quantized scales")
    return stored
