"""The constraints on the sizes of a routing: the choices of a row, and the groups of experts."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fusedops._contract.constraint import Arguments, Constraint
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._named_tuple import NamedTuple
from fusedops._report.reason import ReasonCode
from fusedops.constraints import (
    Beside,
    Classes,
    Count,
    Finite,
    Flag,
    Floating,
    LastDims,
    OneOf,
    Rank,
    SameDevice,
)
from fusedops.constraints.counts import CountBeside
from fusedops.constraints.relations import same_shape
from fusedops.constraints.tensors import possible
from fusedops.ops.routing.formulas import GROUP_SCORES, SCORES


def _most(logits: Any, groups: Any, top_groups: Any) -> int:
    """Return the number of experts that may be chosen: those of the best groups."""
    experts = logits.shape[-1] if logits.dim() else 0
    sizes = (groups, top_groups)
    if sizes == (1, 1) or not all(type(each) is int and each > 0 for each in sizes):
        return experts  # another constraint refuses groups
    return min(experts, experts // groups * top_groups)


class ChoiceCount(CountBeside):
    """At most all experts, or those of the best groups."""

    beside = ("logits", "groups", "top_groups")
    text = "an integer from 1 to the number of experts in the best groups"

    def fits(self, value: int, *others: Any) -> bool:
        return possible(value <= _most(*others))

    def needed(self, *others: Any) -> str:
        return f"an integer from 1 to {_most(*others)}, the experts that may be chosen"

    def candidates(self, *others: Any) -> list[int]:
        most = _most(*others)
        return [most, most + 1]


class GroupCount(CountBeside):
    """A divisor of the number of experts. A group whose score is that of its two best has at least two."""

    beside = ("logits", "group_score")
    text = "a divisor of the number of experts, which leaves at least 2 in a group by 'top2'"

    def fits(self, value: int, *others: Any) -> bool:
        logits, group_score = others
        if value == 1 or not logits.dim():
            return True
        experts = logits.shape[-1]
        least = 2 if group_score == "top2" else 1
        return possible(experts % value == 0) and possible(experts >= least * value)

    def needed(self, *others: Any) -> str:
        logits, group_score = others
        least = " that leaves at least 2 in a group" if group_score == "top2" else ""
        return f"1, or a divisor of {logits.shape[-1] if logits.dim() else 0}{least}"

    def candidates(self, *others: Any) -> list[int]:
        logits = others[0]
        experts = logits.shape[-1] if logits.dim() else 1
        return [2, 3, 4, experts // 2, experts, experts + 1]


class TopGroupCount(CountBeside):
    """At most all groups."""

    beside = ("groups",)
    text = "an integer from 1 to groups"

    def fits(self, value: int, *others: Any) -> bool:
        return type(others[0]) is not int or possible(value <= others[0])

    def needed(self, *others: Any) -> str:
        return f"an integer from 1 to groups, {others[0]}"

    def candidates(self, *others: Any) -> list[int]:
        groups = others[0]
        return [2, groups, groups + 1] if type(groups) is int else [2]


class IndexFits(Beside):
    """The tensor has the leading dims of ``other``, and k in the last."""

    code = ReasonCode.SIZE
    reads_shapes = True

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.other, "k")

    def expression(self, constants: dict[str, object]) -> str:
        # the ranks first: of tuples of two lengths Python compares the sizes first
        name, other = f"{self.name}.shape", f"{self.other}.shape"
        return f"len({name}) == len({other}) and {name}[-1] == k and {name}[:-1] == {other}[:-1]"

    def accepts(self, tensor: Any, other: Any, k: Any) -> bool:
        if tensor.dim() != other.dim() or not other.dim():
            return False
        return possible(tensor.shape[-1] == k) and same_shape(tensor.shape[:-1], other.shape[:-1])

    def rule(self) -> str:
        return f"the shape of {self.other}, with k in its last dim"

    def needed(self, tensor: Any, other: Any, k: Any) -> str:
        return f"{self.rule()}, {(*other.shape[:-1], k)}"

    def fix_of(self, tensor: Any, other: Any, k: Any) -> str:
        return f"pass k experts for each row of {self.other}"

    def follow(self, args: Arguments) -> TensorSpec | None:
        values = self.arguments(args)
        if values is None or not values[1].dim() or type(values[2]) is not int:
            return None
        return values[0].replace(shape=(*values[1].shape[:-1], values[2]))

    def values(self, tensor: TensorSpec, other: TensorSpec, k: Any) -> Iterator[tuple[str, TensorSpec]]:
        if not other.dim() or type(k) is not int:
            return iter(())
        lead = other.shape[:-1]
        return self.shaped(tensor, sorted({(*lead, k), (*lead, k + 1), lead, (1, *lead, k)}))


CONSTRAINTS: tuple[Constraint, ...] = (
    Floating("logits"),
    Rank("logits", at_least=1),
    OneOf("score", *SCORES),
    OneOf("group_score", *GROUP_SCORES),
    Count("groups", optional=False),
    GroupCount("groups"),
    Count("top_groups", optional=False),
    TopGroupCount("top_groups"),
    Count("k", optional=False),
    ChoiceCount("k"),
    Floating("bias"),
    SameDevice("bias", "logits"),
    LastDims("bias", "logits"),
    Flag("normalize"),
    Finite("eps", at_least=0.0),
    Finite("scale"),
    Classes("index", integers=True),
    SameDevice("index", "logits"),
    IndexFits("index", "logits"),
)


class TopKRoutingArgs(NamedTuple):
    """The arguments of top_k_routing."""

    logits: Tensor
    k: int
    score: str
    bias: Tensor | None
    groups: int
    top_groups: int
    group_score: str
    normalize: bool
    eps: float
    scale: float
    index: Tensor | None  # pyright: ignore[reportIncompatibleMethodOverride]


class TopKRoutingGradArgs(NamedTuple):
    """The arguments of the backward of top_k_routing."""

    grad_weights: Tensor
    logits: Tensor
    chosen: Tensor
    k: int
    score: str
    normalize: bool
    eps: float
    scale: float
