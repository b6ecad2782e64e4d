"""PEFT's adapters of the stacked weights of experts (``target_parameters``), computed as factors of LoRA.

PEFT wraps the experts once for each weight, and adds an adapter to the whole weight in each forward, for which it needs
the memory of all experts. Here the wrappers' factors go to :func:`fusedops.experts`, also beside packed weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fusedops.integrations._replacement import Replacement, own_class, replacement_of
from fusedops.integrations.transformers._modules.experts import ADAPTERS, experts_of


@dataclass(frozen=True)
class AdaptedExperts(Replacement):
    """The settings of a wrapper of experts.

    Attributes:
        stays: True where the experts are packed: the wrapper's own forward has no weight to add to.
    """

    stays: bool = False
    op: str = "experts"
    runs_own_code = True

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the experts with the factors of all wrappers; as PEFT does where it adds none, or has merged them."""
        base = module.get_base_layer()
        settings: Any = replacement_of(base)
        wrappers = list(_wrappers(module))
        as_they_are = any(each.disable_adapters or each.merged for each in wrappers) or "adapter_names" in kwargs
        if as_they_are or not getattr(settings, "takes_adapters", False):
            return own_class(module).forward(module, *args, **kwargs)
        pairs = {each.parameter_name: _factors(each) for each in wrappers}
        return base(*args, **kwargs, **{ADAPTERS: pairs})

    def among(self, chosen: set[str]) -> Replacement | None:
        """Return the replacement itself where the weights are packed."""
        return self if self.stays else super().among(chosen)


def recognised_adapter(module: Any) -> Replacement | str | None:
    """Return the replacement of a wrapper of experts, the reason why it is left, or None for another module.

    >>> recognised_adapter(torch.nn.Linear(2, 2))
    """
    if not is_adapter(module):
        return None
    base = module.get_base_layer()
    experts = experts_of(base)
    if experts is None or isinstance(experts, str):
        return experts
    if module.parameter_name not in experts.weights:
        return f"its parameter {module.parameter_name} is no weight that is multiplied"
    return AdaptedExperts(stays=experts.stays)


def is_adapter(module: Module) -> bool:
    """Return True for PEFT's wrapper of a parameter."""
    kind = own_class(module)
    return kind.__name__ == "ParamWrapper" and kind.__module__.startswith("peft.")


def _wrappers(module: Any) -> Iterator[Any]:
    """Yield a wrapper and those within it."""
    while is_adapter(module):
        yield module
        module = module.base_layer


def _factors(wrapper: Any) -> tuple[Tensor, Tensor, float] | None:
    """Return A (E, r, inputs), B (E, outputs, r) and the scale of the active adapters; the ranks of several are one."""
    experts, names = wrapper.num_experts, [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if not names:
        return None
    first, second = ([each[name].weight for name in names] for each in (wrapper.lora_A, wrapper.lora_B))
    a = [each.reshape(experts, -1, each.shape[1]) for each in first]
    b = [each.reshape(each.shape[0], -1, experts).permute(2, 0, 1) for each in second]
    scales = [wrapper.scaling[name] for name in names]
    if len(names) == 1:
        return a[0], b[0], scales[0]
    return torch.cat(a, 1), torch.cat([each * scale for each, scale in zip(b, scales)], 2), 1.0
