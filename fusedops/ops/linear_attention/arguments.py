"""The constraints and the results of linear_attention; the bounds of packed sequences as integers."""

from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor

from fusedops._contract.constraint import Arguments, Constraint
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._named_tuple import NamedTuple
from fusedops._storages import freed_error, is_freed
from fusedops.constraints import (
    Beside,
    Between,
    Dim,
    DimMultiple,
    Finite,
    Flag,
    Floating,
    Offsets,
    Present,
    Rank,
    ReasonCode,
    SameDevice,
    SameDims,
    SameShape,
    When,
    constant,
)
from fusedops.constraints.relations import same_shape
from fusedops.dtypes import arithmetic
from fusedops.errors import InvalidInputError

Shape = tuple[int, ...]


class GroupedHeads(DimMultiple):
    """The heads of v are a multiple of those of q."""

    def follow(self, args: Arguments) -> TensorSpec | None:
        v, q = args[self.name], args[self.other]
        if v.dim() != 4 or q.dim() != 4:
            return None
        heads, unit = v.shape[2], q.shape[2]
        if not unit or heads % unit:
            heads = 2 * unit
        return v.replace(shape=(*q.shape[:2], heads, v.shape[3]))


class _Shaped(Beside):
    """A constraint on the shape of a tensor beside v and other arguments."""

    code = ReasonCode.SIZE
    reads_shapes = True
    more: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.other, *self.more)

    def shapes(self, v: Any, *others: Any) -> list[Shape]:
        """Return the accepted shapes."""
        raise NotImplementedError

    def expression(self, constants: dict[str, object]) -> str:
        return f"{constant(constants, self.accepts)}({', '.join(self.names)})"

    def accepts(self, tensor: Any, v: Any, *others: Any) -> bool:
        if v.dim() != 4 or any(each.dim() != 4 for each in others[:1]):
            return True  # another constraint refuses it
        return any(same_shape(tensor.shape, shape) for shape in self.shapes(v, *others))

    def needed(self, tensor: Any, v: Any, *others: Any) -> str:
        return " or ".join(str(tuple(shape)) for shape in self.shapes(v, *others))

    def fix_of(self, tensor: Any, v: Any, *others: Any) -> str:
        return f"pass {self.name} as {self.rule()}"

    def follow(self, args: Arguments) -> TensorSpec | None:
        values = self.arguments(args)
        if values is None or any(each.dim() != 4 for each in values[1:3]):
            return None
        shapes = self.shapes(*values[1:])
        return values[0].replace(shape=shapes[min(max(values[0].dim() - 3, 0), len(shapes) - 1)])

    def values(self, tensor: TensorSpec, *others: Any) -> Iterator[tuple[str, TensorSpec]]:
        shape = tensor.shape
        return self.shaped(tensor, sorted({shape, (*shape[:-1], shape[-1] + 1), shape[:-1], (*shape, 1)}))


class DecayFits(_Shaped):
    """A decay is (B, S, Hv), or (B, S, Hv, Dk)."""

    more = ("q",)

    def shapes(self, v: Any, *others: Any) -> list[Shape]:
        return [tuple(v.shape[:3]), (*v.shape[:3], others[0].shape[3])]

    def rule(self) -> str:
        return "(B, S, Hv), or (B, S, Hv, Dk)"


class BetaFits(_Shaped):
    """A beta is (B, S, Hv)."""

    def shapes(self, v: Any, *others: Any) -> list[Shape]:
        return [tuple(v.shape[:3])]

    def rule(self) -> str:
        return "(B, S, Hv)"


class StateFits(_Shaped):
    """A state is (B, Hv, Dk, Dv), with N packed sequences (N, Hv, Dk, Dv)."""

    more = ("q", "cu_seqlens")

    def shapes(self, v: Any, *others: Any) -> list[Shape]:
        q, cu_seqlens = others
        count = v.shape[0] if cu_seqlens is None or cu_seqlens.dim() != 1 else cu_seqlens.shape[0] - 1
        return [(count, v.shape[2], q.shape[3], v.shape[3])]

    def rule(self) -> str:
        return "(B, Hv, Dk, Dv), with cu_seqlens (N, Hv, Dk, Dv)"


def bounds_of(name: str, cu_seqlens: Tensor, positions: int) -> list[int]:
    """Return the N + 1 bounds of packed sequences as integers, which a kernel reads once: a device is waited for.

    Bounds on a CPU are checked; those of another device are clamped, as :func:`formulas.packed_of` does.

    Args:
        name: of the op, for the message.
        cu_seqlens: (N + 1,), int32 or int64. On the meta device, which has no numbers, the last sequence has all.
        positions: S.

    Raises:
        InvalidInputError: on a CPU a bound is below the one before it, below 0, or above ``positions``.

    >>> import torch
    >>> from fusedops.ops.linear_attention.arguments import bounds_of
    >>> bounds_of("linear_attention", torch.tensor([0, 2, 5]), 5)
    [0, 2, 5]
    """
    if cu_seqlens.is_meta:
        return [0] * (cu_seqlens.shape[0] - 1) + [positions]
    if is_freed(cu_seqlens):
        raise freed_error(name, "cu_seqlens")
    bounds: list[int] = []
    values: list[int] = cast("Any", cu_seqlens).tolist()
    before = 0
    for n, bound in enumerate(values):
        if not before <= bound <= positions and cu_seqlens.is_cpu:
            after = f" after {before}" if n else ""
            raise InvalidInputError(
                f"{name}: got cu_seqlens[{n}] = {bound}{after}, expected a bound from {before} to {positions}, the "
                f"positions of q; to fix: pass 0 and the sums of the lengths of the sequences"
            )
        before = min(max(bound, before), positions)
        bounds.append(before)
    return bounds


def wanted(results: Any, return_state: bool) -> Any:
    """Return out, or (out, state) with ``return_state``. Under torch.fx.symbolic_trace the results are one proxy."""
    return results if return_state or type(results) is not tuple else cast("Any", results)[0]


def empty(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    normalize: bool,
    initial_state: Tensor | None,
    return_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return empty outputs."""
    count = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = arithmetic(q, k, v, decay, beta, initial_state)
    return v.new_empty(v.shape), v.new_empty((count, v.shape[2], q.shape[3], v.shape[3]), dtype=dtype)


_PACKED = Present("cu_seqlens")
_ONE_BATCH = "pack the sequences one after another along dim 1, in a batch of 1"
CONSTRAINTS: tuple[Constraint, ...] = (
    Floating("q"),
    Floating("k"),
    Floating("v"),
    Rank("q", 4),
    Rank("k", 4),
    Rank("v", 4),
    SameDevice("k", "q"),
    SameDevice("v", "q"),
    SameShape("k", "q"),
    SameDims("v", "q", (0, 1)),
    GroupedHeads("v", "q", 2),
    Between("decay", None, 0.0),
    SameDevice("decay", "q"),
    DecayFits("decay", "v"),
    Between("beta", 0.0, 1.0),
    SameDevice("beta", "q"),
    BetaFits("beta", "v"),
    Finite("scale", optional=True),
    Flag("normalize"),
    Flag("return_state"),
    Offsets("cu_seqlens", dim=1),
    SameDevice("cu_seqlens", "q"),
    Rank("cu_seqlens", 1),
    Dim("cu_seqlens", (0,), at_least=2),
    When(_PACKED, Dim("q", (0,), at_least=1, at_most=1, fix=_ONE_BATCH)),
    Floating("initial_state"),
    SameDevice("initial_state", "q"),
    Rank("initial_state", 4),
    StateFits("initial_state", "v"),
)


class LinearAttentionArgs(NamedTuple):
    """The arguments of linear_attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    beta: Tensor | None
    scale: float | None
    normalize: bool
    initial_state: Tensor | None
    return_state: bool
    cu_seqlens: Tensor | None


class LinearAttentionGradArgs(NamedTuple):
    """The arguments of the backward of linear_attention."""

    grad_out: Tensor
    grad_state: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    beta: Tensor | None
    scale: float | None
    normalize: bool
    initial_state: Tensor | None
    return_state: bool
    cu_seqlens: Tensor | None
    needs: tuple[bool, ...]
