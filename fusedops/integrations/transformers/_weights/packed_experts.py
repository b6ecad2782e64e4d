"""The experts of a mixture with packed weights, which a model keeps in place of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from fusedops import quantization
from fusedops.integrations._replacement import Replaced, Replacement, replacement_of, restore
from fusedops.integrations._replacement import replace as replace_forward
from fusedops.integrations.transformers._modules.expert_adapters import (
    AdaptedExperts,
    is_adapter,
    recognised_adapter,
)
from fusedops.integrations.transformers._modules.experts import ADAPTERS, WholeExperts
from fusedops.nn._packed_weight import PackedWeight
from fusedops.nn._quantized import KEYS, PARTS, packed_value
from fusedops.quantization import FORMATS, SCALED, Packed, block_of

FORMATS_OF_EXPERTS = (*FORMATS, *SCALED)


@dataclass(frozen=True)
class PackedExperts(Replacement):
    """The settings of experts with packed weights.

    Attributes:
        whole: those of the same experts with weights as they were.
        applied: True where ``apply`` had replaced them before.
        format: of the weights.
        dtype: of the weights as they were.
        requires_grad: of up and down as they were.
    """

    whole: WholeExperts
    applied: bool
    format: str
    dtype: torch.dtype
    requires_grad: tuple[bool, bool]
    op: str = "quantized_experts"
    has_activation = True
    takes_adapters = True
    stays = True

    @property
    def mixin(self) -> type[Replaced]:
        """Return the class that keeps the dtypes of scales."""
        return _Packed

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the experts of the tokens, of the routers' indices and of the weights."""
        (up, up_bias), (down, down_bias) = self.whole.up, self.whole.down
        tensors: list[Any] = [packed_of(module, name, self.format) for name in (up, down)]
        tensors += [getattr(module, name, None) for name in (up_bias, down_bias)]
        adapters = kwargs.pop(ADAPTERS, {})
        return replace(self.whole, transposed=False).on(adapters, *tensors, *args, *kwargs.values())

    @property
    def weights(self) -> tuple[str, str]:
        """Return the names of the weights as they were."""
        return self.whole.weights

    def among(self, chosen: set[str]) -> Replacement | None:
        """Return the replacement itself: without it the weights have no use."""
        return self


def _weight_to_read(name: str) -> property:
    """Return the property of a weight as it was: shape, dtype and device cost nothing, its numbers an unpack."""

    def weight(module: Any) -> PackedWeight:
        own = replacement_of(module)
        if not isinstance(own, PackedExperts) or name not in own.weights:
            raise AttributeError(name)
        key = f"{name}_{KEYS[own.format]}"
        parts = {part: each for part in PARTS if (each := getattr(module, f"{key}_{part}", None)) is not None}
        return PackedWeight.of(getattr(module, key), own.format, own.dtype, parts, own.whole.transposed)

    return property(weight)


class _Packed(Replaced):
    """The part of experts' class that keeps the dtypes of scales, as a rounded one is of another weight, and has the
    weights for those who read them: PEFT, which takes the shape of an adapter from its weight.
    """

    gate_up_proj, up_proj, down_proj = map(_weight_to_read, ("gate_up_proj", "up_proj", "down_proj"))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Return the parameters, and for PEFT's search of ``target_parameters`` the weights as they were before them.

        Only PEFT gets these: accelerate moves each parameter of a module to its device, by its name.
        """
        module: Any = self
        every = list(cast("Any", super()).named_parameters(*args, **kwargs))
        caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        if kwargs.get("recurse", True) or not caller.f_globals.get("__name__", "").startswith("peft."):
            return iter(every)
        return iter([*((name, getattr(module, name)) for name in module._fusedops_replacement.weights), *every])

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        own: Any = self
        before = {name: each for name, each in own._buffers.items() if "_packed_" in name}
        result = cast("Any", super())._apply(fn, recurse)
        for name, part in before.items():
            own._buffers[name] = part.to(own._buffers[name].device)
        return result


def packed_of(module: Any, name: str, format: str) -> Packed:
    """Return a packed weight of a module, views of its parameter and buffers."""
    key = f"{name}_{KEYS[format]}"
    codes, parts = getattr(module, key), {part: getattr(module, f"{key}_{part}", None) for part in PARTS}
    columns = quantization.weights_of_row(codes.shape[-1], format)
    return Packed(format, codes.detach(), **parts, shape=(*codes.shape[:-1], columns))


def hold(module: Any, name: str, packed: Packed) -> None:
    """Let a module keep a packed weight: the codes as a parameter, what is beside them as buffers."""
    key = f"{name}_{KEYS[packed.format]}"
    for part, tensor in packed.tensors().items():
        if part == "codes":
            module.register_parameter(key, Parameter(tensor, requires_grad=False))
        else:
            module.register_buffer(f"{key}_{part}", tensor)


def reason_to_leave(module: Module, experts: WholeExperts, format: str) -> str:
    """Return why experts stay as they are; empty where they can be packed."""
    for name, _ in (experts.up, experts.down):
        weight: Any = getattr(module, name)
        if type(weight) is not Parameter or not weight.is_floating_point():
            return "its weight is no plain parameter of floating numbers"
        if weight.is_meta:
            return "its weight is not loaded"
        columns, block = weight.shape[1 if experts.transposed else 2], block_of(format)
        if columns % block:
            return f"a row has {columns} weights, no multiple of {block}, the block of {format}"
        beyond = quantization.beyond_range(weight, format)
        if beyond:
            return f"its weight has {beyond}"
    return ""


@torch.inference_mode(False)
def pack_experts(module: Any, experts: WholeExperts, format: str) -> None:
    """Pack up, then down, and free the weights as they were."""
    applied = isinstance(replacement_of(module), WholeExperts)
    names = experts.up[0], experts.down[0]
    settings = [(getattr(module, name).dtype, getattr(module, name).requires_grad) for name in names]
    for name in names:
        weight: Tensor = getattr(module, name).detach()
        weight = weight.mT if experts.transposed else weight
        packed = packed_value(weight, format)
        delattr(module, name)
        hold(module, name, packed)
    needs = (settings[0][1], settings[1][1])
    restore(module)  # the class that apply gave it
    replace_forward(module, PackedExperts(experts, applied, format, settings[0][0], needs))


def replace_adapters(modules: Iterable[Module]) -> None:
    """Let the wrappers of packed experts, which cannot add to a weight, give their factors to them; or no more."""
    for module in modules:
        if not is_adapter(module):
            continue
        own = replacement_of(cast("Any", module).get_base_layer())
        if isinstance(own, PackedExperts) and isinstance(recognised_adapter(module), AdaptedExperts):
            replace_forward(module, AdaptedExperts(stays=True))
        elif isinstance(own, WholeExperts):
            replace_forward(module, AdaptedExperts())
        else:
            restore(module)


@torch.inference_mode(False)
def unpack_experts(modules: Iterable[Any]) -> None:
    """Give packed experts their weights again: the values that the format has."""
    for module in modules:
        own = replacement_of(module)
        if not isinstance(own, PackedExperts):
            continue
        for (name, _), needs in zip((own.whole.up, own.whole.down), own.requires_grad):
            weight = quantization.unpack(packed_of(module, name, own.format), own.dtype)
            key = f"{name}_{KEYS[own.format]}"
            for each in (key, *(f"{key}_{part}" for part in PARTS)):
                if hasattr(module, each):
                    delattr(module, each)
            weight = weight.mT.contiguous() if own.whole.transposed else weight
            module.register_parameter(name, Parameter(weight, requires_grad=needs))
        restore(module)
        if own.applied:
            replace_forward(module, own.whole)
