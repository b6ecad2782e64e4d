"""Which tensors and modules a call by an op is made for."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from fusedops._torch import autocasts, is_plain_or_planned, is_traced, is_transformed
from fusedops.integrations._modules.norms import Norm
from fusedops.integrations._replacement import replacement_of
from fusedops.integrations._trial.twin import is_untouched


def are_taken(*tensors: Any) -> bool:
    """Return True for plain tensors, and those of a plan, outside of a trace, of torch.func and of autocast."""
    if is_traced() or is_transformed():
        return False
    return all(is_plain_or_planned(each) for each in tensors) and not autocasts(tensors[0].device.type)


def norm_of(module: Any) -> Norm | None:
    """Return the settings of a norm whose forward is an op's, and that nothing else watches or has changed."""
    replacement = replacement_of(module) if isinstance(module, Module) else None
    return replacement if isinstance(replacement, Norm) and is_untouched(module) else None
