"""The modules that have no row in the table of apply, although their code calls what an op can replace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch.nn import Module

from fusedops.integrations._applied import Row
from fusedops.integrations._replacement import own_class, replacement_of

# functions of torch and of other libraries that an op can take the place of
_FUNCTIONS = {
    "_transformer_encoder_layer_fwd",  # of torch.nn.TransformerEncoderLayer in evaluation, in place of its modules
    "cross_entropy",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flex_attention",
    "gelu",
    "layer_norm",
    "log_softmax",
    "multi_head_attention_forward",
    "nll_loss",
    "rms_norm",
    "rsqrt",
    "scaled_dot_product_attention",
    "silu",
    "softmax",
}
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations", "diffusers.models.activations")


def sentences_of(model: Module, rows: Iterable[Row]) -> list[str]:
    """Return the sentence about the modules without a row, if there are any."""
    known = {row.module for row in rows}
    is_attention_left = any(row.family == "attention" and not row.op for row in rows)  # a row of the whole model

    def has_row(name: str) -> bool:
        return name in known or (is_attention_left and "attention" in name.lower())

    text = not_looked_at(model, has_row)
    return [text] if text else []


def not_looked_at(model: Module, has_row: Callable[[str], bool]) -> str:
    """Return a sentence that counts the modules without a row whose code calls a function that an op can replace.

    A replaced module is left out with its children, and so is an activation alone, which no op but the GELU's computes.

    Args:
        model: any module, after the replacements.
        has_row: returns True for the name of a class that has a row in the table.
    """
    counts, names = Counter[str](), dict[type[Any], str]()
    for module in _outside_of_replaced(model):
        kind = own_class(module)
        if has_row(kind.__name__) or _is_activation(module):
            continue
        if kind not in names:
            called = _names_in(kind).difference(
                dict(module.named_children())
            )  # self.layer_norm is a child with a row of its own
            names[kind] = ", ".join(sorted(called & _FUNCTIONS))
        if names[kind]:
            counts[f"{kind.__name__} ({names[kind]})"] += 1
    return f"not looked at: {', '.join(f'{count} {name}' for name, count in counts.items())}" if counts else ""


def _outside_of_replaced(module: Module) -> Iterator[Module]:
    replacement = replacement_of(module)
    if replacement is not None and not replacement.runs_own_code:
        return
    yield module
    for child in module.children():
        yield from _outside_of_replaced(child)


def _is_activation(module: Module) -> bool:
    return own_class(module).__module__ in _ACTIVATIONS and next(module.parameters(), None) is None


def _names_in(kind: type[Any]) -> set[str]:
    """Return the names in the code of a forward, and of the methods and functions of its file that it calls."""
    names, seen = set[str](), set[FunctionType]()
    waiting: list[Any] = [getattr(kind, "forward", None)]
    while waiting:
        function = waiting.pop()
        function = getattr(function, "__wrapped__", function)
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        own = set(_names_of(function.__code__))
        names |= own
        for holder in (vars(kind), function.__globals__):
            called = (holder.get(name) for name in own)
            waiting += [each for each in called if getattr(each, "__module__", None) == function.__module__]
    return names


def _names_of(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a code and in the functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of(constant)
