"""The arguments of the causal convolution: constraints, defaults made explicit, empty results, checks of bounds."""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from fusedops._contract.constraint import Constraint
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._named_tuple import NamedTuple
from fusedops._storages import freed_error, is_freed
from fusedops.constraints import (
    Arguments,
    Dim,
    Flag,
    Floating,
    Offsets,
    OneOf,
    Present,
    Rank,
    ReasonCode,
    SameDevice,
    SameDType,
    SameSize,
    TensorConstraint,
    When,
)
from fusedops.constraints.tensors import possible
from fusedops.errors import InvalidInputError
from fusedops.ops.convolution.formulas import NONE, SILU

Shape = tuple[int, ...]


class ConvStateFits(TensorConstraint):
    """initial_state has the last W - 1 inputs before each sequence: (B, C, W - 1), of packed ones (N, C, W - 1)."""

    code = ReasonCode.SIZE
    reads_shapes = True

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, "x", "weight", "cu_seqlens")

    def expression(self, constants: dict[str, object]) -> str:
        # sizes one by one: of tuples of two lengths Python compares the sizes first, see LastDims
        count = "x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1"
        sizes = [f"({count})", "x.shape[1]", "weight.shape[1] - 1"]
        return " and ".join(f"{self.name}.shape[{dim}] == {size}" for dim, size in enumerate(sizes))

    def accepts(self, state: Any, x: Any, weight: Any, cu_seqlens: Any) -> bool:
        if not _have_ranks(state, x, weight, cu_seqlens):
            return True  # another constraint refuses it
        return all(possible(a == b) for a, b in zip(state.shape, self._shape(x, weight, cu_seqlens)))

    def _shape(self, x: Any, weight: Any, cu_seqlens: Any) -> Shape:
        count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return (count, x.shape[1], weight.shape[1] - 1)

    def rule(self) -> str:
        return "(B, C, W - 1); with cu_seqlens (N, C, W - 1)"

    def needed(self, state: Any, x: Any, weight: Any, cu_seqlens: Any) -> str:
        first = "batches" if cu_seqlens is None else "sequences"
        return f"{self._shape(x, weight, cu_seqlens)}, the {first}, channels and W - 1"

    def fix_of(self, state: Any, x: Any, weight: Any, cu_seqlens: Any) -> str:
        count, channels, kept = self._shape(x, weight, cu_seqlens)
        if tuple(state.shape) == (count, channels, kept + 1):  # caches with the newest input too
            return f"pass {self.name}[..., 1:], without the oldest input"
        return f"pass the last {kept} inputs before each sequence"

    def follow(self, args: Arguments) -> TensorSpec | None:
        state, x, weight, cu_seqlens = (args[name] for name in self.names)
        if state is None or not _have_ranks(state, x, weight, cu_seqlens):
            return None
        return state.replace(shape=self._shape(x, weight, cu_seqlens))

    def values(self, state: TensorSpec, *others: Any) -> Iterator[tuple[str, TensorSpec]]:
        n, c, kept = state.shape
        return self.shaped(state, sorted({(n, c, kept), (n, c, kept + 1), (n, c + 1, kept), (n + 1, c, kept)}))


def _have_ranks(state: Any, x: Any, weight: Any, cu_seqlens: Any) -> bool:
    return (state.dim(), x.dim(), weight.dim(), 1 if cu_seqlens is None else cu_seqlens.dim()) == (3, 3, 2, 1)


_ONE_BATCH = "pack the sequences one after another along dim 2, in a batch of 1"
CONSTRAINTS: tuple[Constraint, ...] = (
    Floating("x"),
    Rank("x", 3),
    Floating("weight"),
    SameDevice("weight", "x"),
    Rank("weight", 2),
    SameSize("weight", 0, "x", 1),
    Dim("weight", (1,), at_least=2, at_most=8),
    Floating("bias"),
    SameDevice("bias", "x"),
    Rank("bias", 1),
    SameSize("bias", 0, "x", 1),
    OneOf("activation", NONE, SILU),
    Offsets("cu_seqlens", dim=2),
    SameDevice("cu_seqlens", "x"),
    Rank("cu_seqlens", 1),
    Dim("cu_seqlens", (0,), at_least=1),
    When(Present("cu_seqlens"), Dim("x", (0,), at_least=1, at_most=1, fix=_ONE_BATCH)),
    Floating("initial_state"),
    SameDevice("initial_state", "x"),
    SameDType("initial_state", "x"),
    Rank("initial_state", 3),
    ConvStateFits("initial_state"),
    Flag("return_state"),
)


def prepare_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with ``activation`` as a text: None is "none"."""
    return (*args[:3], NONE, *args[4:]) if args[3] is None else args


def wanted(results: Any, return_state: bool) -> Any:
    """Return y, or (y, state) with ``return_state``. Under torch.fx.symbolic_trace the results are one proxy."""
    return results if return_state or type(results) is not tuple else cast("Any", results)[0]


def empty(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    initial_state: Tensor | None,
    return_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return empty outputs: the dims of y in memory in the order of x's; no element of a state that is not wanted."""
    return torch.empty_like(x), empty_state(x, weight, return_state, cu_seqlens)


def empty_state(x: Tensor, weight: Tensor, return_state: bool, cu_seqlens: Tensor | None) -> Tensor:
    """Return an empty state, (B, C, W - 1), of packed sequences (N, C, W - 1); (0,) where it is not wanted."""
    if not return_state:
        return x.new_empty(0)
    count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty(count, x.shape[1], weight.shape[1] - 1)


def check_bounds(cu_seqlens: Tensor | None, positions: int) -> list[int] | None:
    """Check the bounds of packed sequences where they are on a CPU; another device is not waited for.

    Args:
        cu_seqlens: (N + 1,), int32 or int64, or None.
        positions: S.

    Returns:
        The bounds that were checked, as integers: the tensor may be written meanwhile. None for another device.

    Raises:
        InvalidInputError: on a CPU a bound is below the one before it, below 0, or above S.
    """
    if cu_seqlens is None or not cu_seqlens.is_cpu:
        return None
    if is_freed(cu_seqlens):
        raise freed_error("causal_conv1d", "cu_seqlens")
    values: list[int] = cast("Any", cu_seqlens).tolist()
    before = 0
    for n, bound in enumerate(values):
        if not before <= bound <= positions:
            after = f" after {before}" if n else ""
            raise InvalidInputError(
                f"causal_conv1d: got cu_seqlens[{n}] = {bound}{after}, expected the start of a sequence from {before} "
                f"to {positions}, the positions of x; to fix: pass 0 and the sums of the lengths, as in "
                f"torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"
            )
        before = bound
    return values


class CausalConv1dArgs(NamedTuple):
    """The arguments of causal_conv1d."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    activation: str = "none"
    initial_state: Tensor | None = None
    return_state: bool = False
    cu_seqlens: Tensor | None = None


class CausalConv1dGradArgs(NamedTuple):
    """The arguments of the backward of causal_conv1d."""

    grad_y: Tensor
    grad_state: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    activation: str
    return_state: bool
    needs: tuple[bool, ...]
