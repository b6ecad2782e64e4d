"""The constraints on the tensors of the ops of experts, whose layout depends on other arguments; the ends of groups."""

from collections.abc import Iterator
from typing import Any, TypeVar, cast

from torch import Tensor

from fusedops._contract.constraint import Constraint
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._named_tuple import NamedTuple
from fusedops._storages import freed_error, is_freed
from fusedops.constraints import (
    Arguments,
    Beside,
    Bytes,
    Classes,
    Finite,
    Flag,
    Floating,
    Offsets,
    OneOf,
    PackedPart,
    PackedRows,
    Present,
    Rank,
    ReasonCode,
    SameDevice,
    SameShape,
    SameSize,
    When,
    constant,
)
from fusedops.constraints.tensors import possible, resized
from fusedops.errors import InvalidInputError
from fusedops.quantization import FORMATS, SCALED

GATED = ("swiglu", "geglu", "geglu_tanh")
PLAIN = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
Shape = tuple[int, ...]


def up_fits(up: Shape, x: Shape, activation: str, transposed: bool) -> bool:
    """Return True for up of (E, rows, H), with an even number of rows where they are gate and up."""
    rows, width = (up[2], up[1]) if transposed else (up[1], up[2])
    return width == x[1] and (rows % 2 == 0 or activation not in GATED)


def down_fits(down: Shape, up: Shape, activation: str, transposed: bool) -> bool:
    """Return True for down of (E, H, I), where up has I rows, or 2I."""
    return down == _down_shape(up, activation, transposed)


def _down_shape(up: Shape, activation: str, transposed: bool) -> Shape:
    """Return the shape of down beside up."""
    rows, width = (up[2], up[1]) if transposed else (up[1], up[2])
    inner = rows // 2 if activation in GATED else rows
    return (up[0], inner, width) if transposed else (up[0], width, inner)


class _Weight(Beside):
    """A constraint on the shape of a weight of rank 3 beside another tensor."""

    code = ReasonCode.SIZE
    reads_shapes = True
    rank = 3  # of the other tensor
    options: tuple[str, ...] = ("activation", "transposed")  # on which the layout depends

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.other, *self.options)

    def fits(self, shape: Shape, other: Shape, *options: Any) -> bool:
        """Return True where the shape is accepted."""
        raise NotImplementedError

    def expression(self, constants: dict[str, object]) -> str:
        fits = constant(constants, self.fits)
        return f"{fits}({self.name}.shape, {self.other}.shape, {', '.join(self.options)})"

    def accepts(self, tensor: Any, other: Any, *options: Any) -> bool:
        if tensor.dim() != 3 or other.dim() != self.rank:
            return True  # another constraint refuses it
        return self.fits(tuple(tensor.shape), tuple(other.shape), *options)

    def fix_of(self, tensor: Any, other: Any, *options: Any) -> str:
        return f"pass transposed={not options[-1]} for weights with their last two dims swapped"

    def values(self, tensor: TensorSpec, *others: Any) -> Iterator[tuple[str, TensorSpec]]:
        e, a, b = tensor.shape
        return self.shaped(tensor, sorted({(e, a, b), (e, b, a), (e, a + 1, b), (e, a, b + 1)}))


class UpFits(_Weight):
    """up is (E, 2I, H) for gated activations and (E, I, H) for others; with ``transposed`` the last two are swapped."""

    rank = 2

    def fits(self, shape: Shape, other: Shape, *options: Any) -> bool:
        return up_fits(tuple(shape), tuple(other), *options)

    def follow(self, args: Arguments) -> TensorSpec | None:
        up, x = args[self.name], args[self.other]
        if up.dim() != 3 or x.dim() != 2:
            return None
        return resized(up, 1 if args["transposed"] else 2, x.shape[1])

    def rule(self) -> str:
        return "(E, 2I, H) for gated activations, (E, I, H) for others; transposed: (E, H, 2I) and (E, H, I)"

    def needed(self, tensor: Any, other: Any, activation: str, transposed: bool) -> str:
        rows = "2I" if activation in GATED else "I"
        width = other.shape[1]
        return f"(E, {width}, {rows})" if transposed else f"(E, {rows}, {width})"


class DownFits(_Weight):
    """down is (E, H, I), where up has 2I or I rows; with ``transposed`` the last two dims are swapped."""

    def fits(self, shape: Shape, other: Shape, *options: Any) -> bool:
        return down_fits(tuple(shape), tuple(other), *options)

    def rule(self) -> str:
        return "(E, H, I) beside up; transposed: (E, I, H)"

    def needed(self, tensor: Any, other: Any, activation: str, transposed: bool) -> str:
        return str(_down_shape(tuple(other.shape), activation, transposed))

    def follow(self, args: Arguments) -> TensorSpec | None:
        down, up, activation, transposed = (args[name] for name in self.names)
        return down.replace(shape=_down_shape(up.shape, activation, transposed)) if up.dim() == 3 else None


class WeightFits(_Weight):
    """weight is (E, N, K) beside x of (S, K); with ``transposed`` (E, K, N)."""

    rank = 2
    options = ("transposed",)

    def fits(self, shape: Shape, other: Shape, *options: Any) -> bool:
        return shape[1 if options[0] else 2] == other[1]

    def rule(self) -> str:
        return "(E, N, K) beside x of (S, K); transposed: (E, K, N)"

    def needed(self, tensor: Any, other: Any, transposed: bool) -> str:
        return f"(E, {other.shape[1]}, N)" if transposed else f"(E, N, {other.shape[1]})"

    def follow(self, args: Arguments) -> TensorSpec | None:
        weight, x = args[self.name], args[self.other]
        if weight.dim() != 3 or x.dim() != 2:
            return None
        return resized(weight, 1 if args["transposed"] else 2, x.shape[1])


class FactorFits(_Weight):
    """The first factor of LoRA is (E, r, inputs of the weight)."""

    options = ("transposed",)

    def fits(self, shape: Shape, other: Shape, *options: Any) -> bool:
        return shape[2] == self.inputs(other, *options)

    def inputs(self, other: Shape, *options: Any) -> int:
        """Return the width of the rows that the weight multiplies."""
        return other[1 if options[0] else 2]

    def rule(self) -> str:
        return f"(E, r, inputs of {self.other})"

    def needed(self, tensor: Any, other: Any, *options: Any) -> str:
        return f"({other.shape[0]}, r, {self.inputs(other.shape, *options)})"

    def fix_of(self, tensor: Any, other: Any, *options: Any) -> str:
        return "pass (A, B), of (E, r, inputs) and (E, outputs, r)"

    def follow(self, args: Arguments) -> TensorSpec | None:
        factor, other, *options = (args[name] for name in self.names)
        if factor is None or factor.dim() != 3 or other.dim() != self.rank:
            return None
        return resized(factor, 2, self.inputs(other.shape, *options))


class InnerFactorFits(FactorFits):
    """The first factor of LoRA of a packed down is (E, r, I), where up has I rows, or 2I."""

    options = ("activation",)

    def inputs(self, other: Shape, *options: Any) -> int:
        return _down_shape(other, options[0], False)[2]

    def rule(self) -> str:
        return f"(E, r, I), where {self.other} has I rows, or 2I of gate and up"


class BiasFits(Beside):
    """A tensor has a row for each expert and an element for each output of its weight, as a bias, or more dims."""

    code = ReasonCode.SIZE
    reads_shapes = True

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.other, "transposed")

    def expression(self, constants: dict[str, object]) -> str:
        weight = f"{self.other}.shape"
        return f"{self.name}.shape[:2] == ({weight}[0], {weight}[2] if transposed else {weight}[1])"

    def accepts(self, tensor: Any, other: Any, transposed: bool) -> bool:
        return other.dim() != 3 or tuple(tensor.shape[:2]) == self._shape(other, transposed)

    def _shape(self, weight: Any, transposed: bool) -> Shape:
        return (weight.shape[0], weight.shape[2] if transposed else weight.shape[1])

    def rule(self) -> str:
        return f"(E, outputs of {self.other})"

    def needed(self, tensor: Any, other: Any, transposed: bool) -> str:
        return str(self._shape(other, transposed))

    def fix_of(self, tensor: Any, other: Any, transposed: bool) -> str:
        return f"pass one element for each expert and each output of {self.other}"

    def follow(self, args: Arguments) -> TensorSpec | None:
        bias, weight = args[self.name], args[self.other]
        if bias is None or weight.dim() != 3:
            return None
        return bias.replace(shape=(*self._shape(weight, args["transposed"]), *bias.shape[2:]))

    def values(self, tensor: TensorSpec, *others: Any) -> Iterator[tuple[str, TensorSpec]]:
        e, n, *rest = tensor.shape
        return self.shaped(tensor, [(*sizes, *rest) for sizes in sorted({(e, n), (e, n + 1), (e + 1, n), (n,)})])


class PackedInner(PackedRows):
    """Each row of a packed down has as many weights as its experts' activations: half of the rows of up if gated."""

    options = ("activation",)

    def columns(self, other: Any, *options: Any) -> Any:
        rows = other.shape[-2] if other.dim() > 1 else 0
        return rows // 2 if options[0] in GATED else rows

    def columns_given(self, columns: int) -> str:
        return f"{columns} activations, by dim 1 of {self.other}"

    def expression(self, constants: dict[str, object]) -> str:
        return f"{constant(constants, self.accepts)}({', '.join(self.names)})"

    def accepts(self, packed: Any, other: Any, format: Any, *options: Any) -> bool:
        return not self._is_odd(other, *options) and super().accepts(packed, other, format, *options)

    def _is_odd(self, up: Any, activation: str) -> bool:
        return activation in GATED and up.dim() > 1 and not possible(up.shape[-2] % 2 == 0)

    def rule(self) -> str:
        return f"rows of whole blocks, for the activations of {self.other}"

    def given(self, packed: Any, other: Any, format: Any, *options: Any) -> str:
        if self._is_odd(other, *options):
            return f"{self.other} of shape {tuple(other.shape)}"
        return super().given(packed, other, format, *options)

    def needed(self, packed: Any, other: Any, format: Any, *options: Any) -> str:
        if self._is_odd(other, *options):
            return f"an even number of rows, of gate and up of {options[0]}"
        return super().needed(packed, other, format, *options)

    def fix_of(self, packed: Any, other: Any, format: Any, *options: Any) -> str:
        if self._is_odd(other, *options):
            return f"pack both halves in one {self.other}, or use another activation"
        return super().fix_of(packed, other, format, *options)


def ends_of(name: str, offsets: Tensor, rows: int) -> list[int]:
    """Return the ends of the groups of rows as integers, which a kernel reads once: a device is waited for.

    Offsets on a CPU are checked; those of another device are clamped, as :func:`formulas.valid_ends` does.

    Args:
        name: of the op, for the message.
        offsets: (E,), int32 or int64. On the meta device, where it has no numbers, the first group has every row.
        rows: the number of rows.

    Raises:
        InvalidInputError: on a CPU an offset is below the one before it, below 0, or above ``rows``.

    >>> import torch
    >>> from fusedops.ops.experts.arguments import ends_of
    >>> ends_of("grouped_matmul", torch.tensor([2, 2, 5]), 6)
    [2, 2, 5]
    """
    if offsets.is_meta:
        return [rows] * offsets.shape[0]
    if is_freed(offsets):
        raise freed_error(name, "offsets")
    values: list[int] = cast("Any", offsets).tolist()
    ends: list[int] = []
    before = 0
    for e, end in enumerate(values):
        if not before <= end <= rows and offsets.is_cpu:
            after = f" after {before}" if e else ""
            raise InvalidInputError(
                f"{name}: got offsets[{e}] = {end}{after}, expected the end of a group from {before} to {rows}, the "
                f"rows of x; to fix: pass the sums of the sizes of the groups, as in counts.cumsum(0)"
            )
        before = min(max(end, before), rows)
        ends.append(before)
    return ends


GROUPED: tuple[Constraint, ...] = (
    Floating("x"),
    Rank("x", 2),
    Flag("transposed"),
    Floating("weight"),
    SameDevice("weight", "x"),
    Rank("weight", 3),
    WeightFits("weight", "x"),
    Offsets("offsets"),
    SameDevice("offsets", "x"),
    Rank("offsets", 1),
    SameSize("offsets", 0, "weight", 0),
    Floating("bias"),
    SameDevice("bias", "x"),
    Rank("bias", 2),
    BiasFits("bias", "weight"),
)


def _lora(name: str, *fits: Constraint) -> tuple[Constraint, ...]:
    """Return the constraints on the two factors of LoRA of a weight; ``fits``: on their inputs and outputs."""
    a, b = name, f"{name}_b"
    return (
        *(each for one in (a, b) for each in (Floating(one), SameDevice(one, "x"), Rank(one, 3))),
        *(SameSize(one, 0, "up", 0) for one in (a, b)),
        *fits,
        SameSize(b, 2, a, 1),
        *(When(Present(one), Present(other)) for one, other in ((a, b), (b, a))),
    )


CONSTRAINTS: tuple[Constraint, ...] = (
    Floating("x"),
    Rank("x", 2),
    Classes("index", "up", 0, integers=True, sentinels=True),
    SameDevice("index", "x"),
    Rank("index", 2),
    SameSize("index", 0, "x", 0),
    Floating("weights"),
    SameDevice("weights", "x"),
    SameShape("weights", "index"),
    OneOf("activation", *GATED, *PLAIN),
    Flag("interleaved"),
    Flag("transposed"),
    Floating("up"),
    SameDevice("up", "x"),
    Rank("up", 3),
    UpFits("up", "x"),
    Floating("down"),
    SameDevice("down", "x"),
    Rank("down", 3),
    DownFits("down", "up"),
    Floating("up_bias"),
    SameDevice("up_bias", "x"),
    Rank("up_bias", 2),
    BiasFits("up_bias", "up"),
    Floating("down_bias"),
    SameDevice("down_bias", "x"),
    Rank("down_bias", 2),
    BiasFits("down_bias", "down"),
    Finite("limit", at_least=0.0, optional=True),
    Finite("alpha"),
    Finite("offset"),
    Finite("lora_scale"),
    *_lora("up_lora", FactorFits("up_lora", "up"), BiasFits("up_lora_b", "up")),
    *_lora("down_lora", FactorFits("down_lora", "down"), BiasFits("down_lora_b", "down")),
)
_NUMBERS = [each for each in CONSTRAINTS if isinstance(each, Finite)]
PACKED_PARTS = ("scales", "global_scale", "zeros")  # of a packed weight, beside its codes


def _packed(name: str, format: str, rows: Constraint) -> tuple[Constraint, ...]:
    """Return the constraints on a packed weight of each expert, after the one on its number of experts."""
    parts = [(f"{name}_{part}", part) for part in PACKED_PARTS]
    of_parts = [(SameDevice(own, "x"), PackedPart(own, name, format, part)) for own, part in parts]
    return (OneOf(format, *FORMATS, *SCALED), rows, *(each for pair in of_parts for each in pair))


QUANTIZED: tuple[Constraint, ...] = (
    *CONSTRAINTS[:10],
    Flag("interleaved"),
    Bytes("up"),
    SameDevice("up", "x"),
    Rank("up", 3),
    *_packed("up", "up_format", PackedRows("up", "x", "up_format")),
    Bytes("down"),
    SameDevice("down", "x"),
    Rank("down", 3),
    SameSize("down", 0, "up", 0),
    SameSize("down", 1, "x", 1),
    *_packed("down", "down_format", PackedInner("down", "up", "down_format")),
    Floating("up_bias"),
    SameDevice("up_bias", "x"),
    Rank("up_bias", 2),
    SameSize("up_bias", 0, "up", 0),
    SameSize("up_bias", 1, "up", 1),
    Floating("down_bias"),
    SameDevice("down_bias", "x"),
    Rank("down_bias", 2),
    SameSize("down_bias", 0, "up", 0),
    SameSize("down_bias", 1, "x", 1),
    *_NUMBERS,
    *_lora("up_lora", SameSize("up_lora", 2, "x", 1), SameSize("up_lora_b", 1, "up", 1)),
    *_lora("down_lora", InnerFactorFits("down_lora", "up"), SameSize("down_lora_b", 1, "x", 1)),
)
LORA = ("up_lora", "up_lora_b", "down_lora", "down_lora_b")  # the factors


class ExpertsArgs(NamedTuple):
    """The arguments of experts."""

    x: Tensor
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    weights: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str
    limit: float | None
    alpha: float
    offset: float
    interleaved: bool
    transposed: bool
    up_lora: Tensor | None
    up_lora_b: Tensor | None
    down_lora: Tensor | None
    down_lora_b: Tensor | None
    lora_scale: float


class ExpertsGradArgs(NamedTuple):
    """The arguments of the backward of experts."""

    grad: Tensor
    x: Tensor
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    weights: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    hidden: Tensor
    activation: str
    limit: float | None
    alpha: float
    offset: float
    interleaved: bool
    transposed: bool
    up_lora: Tensor | None
    up_lora_b: Tensor | None
    down_lora: Tensor | None
    down_lora_b: Tensor | None
    lora_scale: float
    needs: tuple[bool, ...]


class QuantizedExpertsArgs(NamedTuple):
    """The arguments of quantized_experts."""

    x: Tensor
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    weights: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str
    limit: float | None
    alpha: float
    offset: float
    interleaved: bool
    up_format: str | None
    down_format: str | None
    up_scales: Tensor | None
    up_global_scale: Tensor | None
    up_zeros: Tensor | None
    down_scales: Tensor | None
    down_global_scale: Tensor | None
    down_zeros: Tensor | None
    up_lora: Tensor | None
    up_lora_b: Tensor | None
    down_lora: Tensor | None
    down_lora_b: Tensor | None
    lora_scale: float


class QuantizedExpertsGradArgs(NamedTuple):
    """The arguments of the backward of quantized_experts."""

    grad: Tensor
    x: Tensor
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    weights: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    hidden: Tensor
    activation: str
    limit: float | None
    alpha: float
    offset: float
    interleaved: bool
    up_format: str | None
    down_format: str | None
    up_scales: Tensor | None
    up_global_scale: Tensor | None
    up_zeros: Tensor | None
    down_scales: Tensor | None
    down_global_scale: Tensor | None
    down_zeros: Tensor | None
    up_lora: Tensor | None
    up_lora_b: Tensor | None
    down_lora: Tensor | None
    down_lora_b: Tensor | None
    lora_scale: float
    needs: tuple[bool, ...]


ArgsOf = TypeVar("ArgsOf", ExpertsArgs, QuantizedExpertsArgs)


def with_factors(a: ArgsOf) -> ArgsOf:
    """Return the arguments with the factors of each pair in their places; ``a`` itself where there is no pair."""
    for name in ("up_lora", "down_lora"):
        given: Any = getattr(a, name)
        if not isinstance(given, (tuple, list)):
            continue
        pair = cast("tuple[Any, ...]", given)
        if len(pair) != 2 or getattr(a, f"{name}_b") is not None:
            op = "experts" if isinstance(a, ExpertsArgs) else "quantized_experts"
            beside = "" if getattr(a, f"{name}_b") is None else f" beside {name}_b"
            raise InvalidInputError(
                f"{op}: got {len(pair)} factors as {name}{beside}, expected (A, B), of (E, r, inputs) and (E, "
                f"outputs, r); to fix: pass both factors of LoRA as a pair"
            )
        a = a._replace(**{name: pair[0], f"{name}_b": pair[1]})
    return a
