"""The attention processors of a model: their calls are changed, and they get the class back that they had."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.nn import Module

from fusedops.integrations._applying import Outcome
from fusedops.integrations.diffusers._forwards.replacement import (
    Changed,
    Processor,
    changed_function,
    original_class,
    processor_class,
    replace_processor,
    restore_processor,
)

_NAME = "processor"  # the attribute of diffusers' attention modules


def processors_of(model: Module) -> Iterator[Any]:
    """Yield the processors of a model, each once. One with weights is a module like others, and is none of them."""
    seen = set[int]()
    for module in model.modules():
        processor = vars(module).get(_NAME)
        if processor is not None and id(processor) not in seen and callable(processor):
            seen.add(id(processor))
            yield processor


def uses_of(model: Module) -> dict[int, int]:
    """Return how many modules call each processor, by its identity."""
    uses = dict[int, int]()
    for module in model.modules():
        processor = vars(module).get(_NAME)
        if processor is not None:
            uses[id(processor)] = uses.get(id(processor), 0) + 1
    return uses


def apply_processors(model: Module, chosen: frozenset[str], classes: dict[Any, Any]) -> Iterator[Outcome]:
    """Change the calls of the processors; yield the outcomes. ``classes`` has what is made in this call of apply."""
    uses = uses_of(model)
    for processor in processors_of(model):
        for outcome in _applied(processor, chosen, classes):
            yield from [outcome] * uses[id(processor)]


def restore_processors(model: Module) -> None:
    """Give the processors of a model their own calls again."""
    for processor in processors_of(model):
        restore_processor(processor)


def _applied(processor: Any, chosen: frozenset[str], classes: dict[Any, Any]) -> list[Outcome]:
    cls = original_class(processor)
    if isinstance(processor, Processor):
        _, ops, left = processor.fusedops_settings
    else:
        if cls not in classes:
            made = changed_function(cls.__call__, chosen)
            ops = tuple(dict.fromkeys(site.op for site in made.sites)) if isinstance(made, Changed) else ()
            classes[cls] = (
                made,
                ops,
                processor_class(cls, chosen, made, ops) if isinstance(made, Changed) and ops else None,
            )
        made, ops, replaced = classes[cls]
        if made is None:
            return []
        if isinstance(made, str):
            return [(cls.__name__, "", made, "attention", "")]
        left = made.left
        if replaced is not None:
            try:
                replace_processor(processor, replaced)
            except TypeError:  # of a class with another layout in memory, such as one with slots
                return [(cls.__name__, "", "Python does not change the class of its objects", "attention", "")]
    return [(cls.__name__, op, "", "", "") for op in ops] + [(cls.__name__, "", why, op, "") for op, why in left]
