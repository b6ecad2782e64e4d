"""Group norms of torch, by ``group_norm``. One with SiLU behind it is replaced in the forward that calls both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.nn import GroupNorm, Module

from fusedops.integrations._replacement import Replacement, own_class
from fusedops.integrations._trial.twin import is_replaced_elsewhere
from fusedops.integrations.diffusers._served.modulated import group_normed


@dataclass(frozen=True)
class Grouped(Replacement):
    """A replaced group norm."""

    op: str = "group_norm"

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the norm by the op, or by the module's own forward a call that the op does not take."""
        given = (*args, *kwargs.values())
        y = group_normed(module, given[0], None) if len(given) == 1 else None
        return own_class(module).forward(module, *args, **kwargs) if y is None else y


def recognised_group_norm(module: Module) -> Replacement | str | None:
    """Return the replacement of a group norm, the reason why it is left, or None for another module.

    >>> import torch
    >>> recognised_group_norm(torch.nn.GroupNorm(2, 4)).op
    'group_norm'
    """
    if own_class(module) is not GroupNorm:
        return None
    return "another library has replaced its forward" if is_replaced_elsewhere(module) else Grouped()
