"""The steps of an ``apply``: a module is recognised, its forward is replaced, and the outcome is a row of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice

import torch
from torch.jit import ScriptModule
from torch.nn import Module

from fusedops.integrations._replacement import Replacement, own_class, replace

# (class of the module, op or "", reason or "", of those that are left the op that was tried, mode of the op or "")
Outcome = tuple[str, str, str, str, str]
Recogniser = Callable[[Module], Replacement | str | None]
_MOST_MODULES = 32  # of one whose outcome is kept for others that are alike


def is_large(module: Module) -> bool:
    """Return True for a module of so many that its outcome is not kept for others."""
    return any(True for _ in islice(module.modules(), _MOST_MODULES, None))


@torch.inference_mode(False)  # a trial has gradients
def recognised_by(module: Module, recognisers: Mapping[str, Recogniser]) -> tuple[str, Replacement | str | None]:
    """Return the family of a module, with its replacement or the reason why it is left."""
    if isinstance(module, ScriptModule):  # its class has no forward
        return "", None
    for family, recognise in recognisers.items():
        recognised = recognise(module)
        if recognised is not None:
            return family, recognised
    return "", None


def forward_applied(
    module: Module,
    chosen: set[str],
    family: str,
    recognised: Replacement | str | None,
    shared: dict[Replacement, Replacement],
) -> list[Outcome]:
    """Replace a module's forward where an op computes the same; return the outcome for each op.

    Equal replacements are one object in ``shared``: torch.compile then compiles the layers of a model once.
    """
    name = own_class(module).__name__
    if recognised is None:
        return []
    if isinstance(recognised, str):
        return [(name, "", recognised, family, "")]
    replacement = recognised.among(chosen)
    if replacement is None:
        return [(name, "", f"ops has no {op}", op, "") for op in recognised.ops]
    replace(module, shared.setdefault(replacement, replacement))
    return outcomes_of(name, replacement)


def outcomes_of(name: str, replacement: Replacement) -> list[Outcome]:
    """Return the outcome for each op of a replacement, and for each that it leaves."""
    called = [(name, op, "", "", replacement.when) for op in replacement.ops]
    return called + [(name, "", reason, op, "") for op, reason in replacement.left]
