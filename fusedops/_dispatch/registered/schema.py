"""The schemas of the registered ops, in torch's language."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from fusedops._contract.op import Op

_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "float": "Scalar",  # not float: a symbolic float would be a constant of the graph
    "float | None": "Scalar?",
    "bool": "bool",
    "int": "int",
    "int | None": "int?",
    "str": "str",
    "str | None": "str?",
    "tuple[bool, ...]": "bool[]",
    "tuple[int, int] | None": "int[]?",
    "torch.dtype": "ScalarType",
}


def forward_schema(op: Op, symbolic: Sequence[int] = ()) -> str:
    """Return the schema of ``torch.ops.fusedops.<op>``, without the name.

    An op that writes arguments returns nothing.

    All parameters of the op are positional: torch's dispatcher takes no keyword-only tensors for autograd, and a
    dropout's seed is one. An op with required saved values has ``save``, and returns them after the outputs.

    Args:
        op: the op.
        symbolic: where the floats are that the overload takes as tensors.

    Raises:
        ValueError: a parameter's annotation is of no type that torch can register.
    """
    save = ["bool save=False"] if op.required_saved else []
    parameters = _parameters(op.types, () if symbolic else op.defaults, symbolic, save, op.written)
    return f"({parameters}) -> {_tensors(0 if op.written else len(op.outputs) + len(op.required_saved))}"


def backward_schema(op: Op, symbolic: Sequence[int] = ()) -> str:
    """Return the schema of ``torch.ops.fusedops.<op>_backward``, which returns the gradients.

    Args:
        op: the op.
        symbolic: where the floats are that the overload takes as tensors.
    """
    return f"({_parameters(op.backward_types, (), symbolic, [])}) -> {_tensors(len(op.differentiable))}"


def _tensors(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def _parameters(
    types: Mapping[str, str],
    defaults: Sequence[Any],
    symbolic: Sequence[int],
    options: Sequence[str],
    written: Sequence[str] = (),
) -> str:
    declared: list[str] = []
    # torch's positional parameters have no default before one without, which a keyword-only one of the op may lack
    first = max((at for at, each in enumerate(defaults, 1) if each is inspect.Parameter.empty), default=0)
    for index, (name, text) in enumerate(types.items()):
        text = text.replace("float", "Tensor") if index in symbolic else text
        given = defaults[index] if defaults and index >= first else inspect.Parameter.empty
        parameter = _parameter(name, text, given)
        if name in written:  # (a!), (b!): none of them is another one
            parameter = parameter.replace("Tensor", f"Tensor({chr(ord('a') + written.index(name))}!)", 1)
        declared.append(parameter)
    return ", ".join([*declared, "*", *options, "str? backend=None"])


def _parameter(name: str, text: str, default: Any) -> str:
    if text not in _TYPES:
        raise ValueError(f"got parameter {name!r} annotated {text!r}, expected one of {', '.join(_TYPES)}")
    declared = f"{_TYPES[text]} {name}"
    if default is inspect.Parameter.empty:
        return declared
    return f'{declared}="{default}"' if isinstance(default, str) else f"{declared}={default}"
