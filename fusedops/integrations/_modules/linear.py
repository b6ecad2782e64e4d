"""Linear layers of torch, of float32 on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

from fusedops import ops
from fusedops._explain import explain
from fusedops._report.reason import ReasonCode
from fusedops._torch import autocasts
from fusedops.integrations._replacement import Replacement, own_class
from fusedops.integrations._trial.twin import is_replaced_elsewhere


@dataclass(frozen=True)
class Dense(Replacement):
    """A replaced linear layer."""

    op: str = "linear"

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer by the op where it is served, else by torch's function."""
        (x,) = (*args, *kwargs.values())
        function = ops.linear if is_served(module, x) else torch.nn.functional.linear
        return function(x, module.weight, module.bias)


def is_served(layer: Any, x: Tensor) -> bool:
    """Return True where all is float32 on the CPU, and of the sizes that the layer takes."""
    weight = layer.weight
    return (
        x.dtype is weight.dtype is torch.float32
        and x.is_cpu
        and weight.is_cpu
        and not autocasts("cpu")
        and x.dim() > 0
        and x.shape[-1] == weight.shape[1]
    )


def recognised_linear(module: Module) -> Replacement | str | None:
    """Return the replacement of a linear layer, the reason why it is left, or None for a module of another class.

    >>> recognised_linear(torch.nn.Linear(2, 2, device="meta"))
    'its weight is not on a CPU in float32'
    """
    if own_class(module) is not Linear:
        return None
    if is_replaced_elsewhere(module):
        return "another library has replaced its forward"
    weight: Any = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None or weight.device.type != "cpu" or weight.dtype is not torch.float32 or weight.dim() != 2:
        return "its weight is not on a CPU in float32"
    candidates = [each for each in explain("linear", weight.detach()[:1], weight, None).candidates if not each.is_other]
    statuses = {each.status for each in candidates}
    in_order = any(reason.code is ReasonCode.ROWS for each in candidates for reason in each.reasons)
    if "eligible" in statuses or (in_order and "selected" in statuses):  # torch's, after a faster one; or refused
        return Dense()
    refused = [each.reasons[0].detail for each in candidates if each.reasons]
    return "torch's own product is as fast" + "".join(f": {reason}" for reason in refused[:1])


def served_linear(module: Module) -> Replacement | None:
    """Return the replacement of a linear layer, or None where it is left."""
    recognised = recognised_linear(module)
    return recognised if isinstance(recognised, Replacement) else None
