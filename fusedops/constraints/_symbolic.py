"""Conditions on sizes that are symbolic: those of a graph for any length."""

from __future__ import annotations

import torch


def possible(condition: bool | torch.SymBool) -> bool:
    """Return a condition on sizes as a bool. True where it depends on data: it is checked again when the graph runs.

    >>> from fusedops.constraints._symbolic import possible
    >>> possible(2 == 3)
    False
    """
    if not isinstance(condition, torch.SymBool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return guard_or_true(condition)
