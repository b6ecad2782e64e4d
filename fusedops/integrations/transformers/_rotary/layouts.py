"""Where cos and sin of a model have their entries, seen from the results of its rotary modules."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module

from fusedops.integrations._replacement import own_class
from fusedops.integrations._trial.twin import (
    Raised,
    called,
    is_replaced_elsewhere,
    numbers,
    pair_of,
    parameters_of,
    twin,
)

# where the entries of cos are: twice as halves, twice as pairs, once, or once as the real parts of complex numbers
Layout = Literal["halves", "pairs", "once", "complex"]


def once(cos: Tensor, layout: Layout) -> Tensor:
    """Return the entries of cos or sin, each once.

    >>> once(torch.tensor([1.0, 1.0, 2.0, 2.0]), "pairs")
    tensor([1., 2.])
    """
    if layout == "once":
        return cos
    return cos[..., ::2] if layout == "pairs" else cos[..., : cos.shape[-1] // 2]


def layouts_of(modules: Iterable[Module]) -> dict[str, set[Layout | None]]:
    """Return where the rotary modules of a model have the entries of cos, by the file that they are from.

    None is among them where a hook, a wrapper or a forward on the instance may change the results.
    """
    found: dict[str, set[Layout | None]] = {}
    for module in modules:
        if _is_rotary(module):
            layouts = {None} if _is_changed(module) else _layouts(module)
            found.setdefault(own_class(module).__module__, set()).update(layouts)
        for name, child in module.named_children():
            if "rotary" in name and not _is_rotary(child):
                for wrapped in filter(_is_rotary, child.modules()):
                    found.setdefault(own_class(wrapped).__module__, set()).add(None)
    return found


def _is_rotary(module: Module) -> bool:
    named = "rotary" in type(module).__name__.lower()
    return named and not any(True for _ in chain(module.parameters(), module.children()))


def _is_changed(module: Any) -> bool:
    """Return True where a call may give something else than the forward of the class."""
    has_call = type(module).__call__ is not Module.__call__
    return has_call or is_replaced_elsewhere(module) or bool(module._forward_hooks)


def _layouts(module: Any) -> set[Layout | None]:
    """Return the layouts of the results of a rotary module, None for results that have none of them."""
    forward: Any = own_class(module).forward
    names = [parameter.name for parameter in parameters_of(forward) or ()]
    if names[:2] != ["x", "position_ids"]:
        return set()  # no pair of cos and sin for positions: another kind of module
    kinds: list[dict[str, Any]] = [{}]
    if "layer_type" in names:
        kinds = [{"layer_type": kind} for kind in set(getattr(module, "layer_types", None) or [None])]
    buffers: dict[str, Any] = {
        name: buffer if buffer is None else numbers(3, *buffer.shape).abs() for name, buffer in module._buffers.items()
    }
    own, x = twin(module, {}, {}, buffers), numbers(4, 1, 7, 8)
    positions = torch.arange(7, device="cpu")[None]
    by_axis = torch.stack([positions, positions + 3, 2 * positions])  # time, height and width, of models of images
    of_patches = by_axis[:2, 0].T  # rows and columns, of Pixtral
    found: set[Layout | None] = set()
    for kind in kinds:
        results = (called(forward, own, x, each, **kind) for each in (positions, by_axis, of_patches))
        found.add(_layout(next((result for result in results if not isinstance(result, Raised)), None)))
    return found


def _layout(result: Any) -> Layout | None:
    pair = pair_of(result)
    if pair is None:
        return None
    size = pair[0].shape[-1]
    if pair[0].dim() not in (2, 3) or pair[1].shape != pair[0].shape or size < 2:
        return None
    if size % 2 == 0 and all(torch.equal(*each.chunk(2, -1)) for each in pair):
        return "halves"
    if size % 2 == 0 and all(torch.equal(each[..., ::2], each[..., 1::2]) for each in pair):
        return "pairs"
    return "once"
