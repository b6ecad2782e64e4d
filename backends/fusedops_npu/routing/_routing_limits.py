"""The limits of npu_moe_gating_top_k on groups, which depend on several sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fusedops.constraints import Arguments, Boundary, Constraint, Reason, ReasonCode, constant

MOST = 2048  # experts; of groups, once each is filled up to a multiple of 32
_UNIT, _LEAST = 32, 3  # experts of a group


def selects_groups(groups: int, top_groups: int) -> bool:
    """Return True where some groups alone are selected; all experts are compared otherwise."""
    return groups not in (1, top_groups)


def taken(logits: Any, groups: int, top_groups: int) -> bool:
    """Return True where the vendor's function takes the groups of a row."""
    if not selects_groups(groups, top_groups):
        return True
    width = logits.shape[-1] // groups
    return width >= _LEAST and groups * -(-width // _UNIT) * _UNIT <= MOST


class GroupsFit(Constraint):
    """A group has at least 3 experts, and all groups, each filled up to a multiple of 32, have at most 2048."""

    code = ReasonCode.SIZE
    none_is_met = False

    @property
    def names(self) -> tuple[str, ...]:
        return ("logits", self.name, "top_groups")

    def expression(self, constants: dict[str, object]) -> str:
        return f"{constant(constants, taken)}(logits, {self.name}, top_groups)"

    def reasons(self, args: Arguments) -> list[Reason]:
        logits, groups, top_groups = (args[name] for name in self.names)
        if taken(logits, groups, top_groups):
            return []
        experts = logits.shape[-1]
        given = f"{groups} groups of {experts // groups} experts"
        needed = f"groups of at least {_LEAST}, at most {MOST} once each is filled up to a multiple of {_UNIT}"
        return [Reason(self.code, given, needed, "use fewer groups, or another backend")]

    def describe(self) -> str:
        return (
            f"{self.name}: of at least {_LEAST} experts, together at most {MOST} once each is filled up to a multiple "
            f"of {_UNIT}, where top_groups is less"
        )

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        logits, bias = args["logits"], args["bias"]
        for groups, width in ((4, 2), (4, 3), (4, 4), (64, 3), (65, 3)):
            shape = (*logits.shape[:-1], groups * width)
            call = {
                **args,
                "logits": logits.replace(shape=shape),
                "bias": bias if bias is None else bias.replace(shape=shape[-1:]),
                "groups": groups,
                "top_groups": 2,
                "k": 2,
            }
            yield Boundary(f"{groups} groups of {width}", call, taken(call["logits"], groups, 2))
