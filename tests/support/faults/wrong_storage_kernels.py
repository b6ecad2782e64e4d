"""Wrong kernels that read memory that is not the call's, for the list in ``wrong_kernels``.

A storage that was freed is taken for an absent tensor; the memory of a tensor is looked up by the tensor, which has
other memory by then.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from wrong_kernels import WRONG, Fault, Run, Wrong, stateful

from fusedops import InvalidInputError


def is_freed(value: Tensor) -> bool:
    """Return True for a tensor that has elements and no memory."""
    return value.numel() > 0 and not value.data_ptr()


def _in_place_of_freed(name: str, other: Callable[[Tensor], Any]) -> Fault:
    """Return a kernel that checks storages itself, but takes one of them that was freed for another value."""

    def fault(run: Run, a: SimpleNamespace) -> Any:
        freed = [key for key, value in vars(a).items() if isinstance(value, Tensor) and is_freed(value)]
        if freed and freed != [name]:
            raise InvalidInputError(f"got {freed[0]}, whose storage was freed")
        return run(**{name: other(getattr(a, name))}) if freed else run()

    return fault


def _absent(value: Tensor) -> None:
    return None


for _op, _direction, _name, _other, _text in (
    ("scaled_masked_softmax", "forward", "mask", _absent, "None"),
    ("rms_norm", "forward", "weight", _absent, "None"),
    ("rms_norm", "backward", "weight", _absent, "None"),
    ("layer_norm", "forward", "bias", _absent, "None"),
    ("add_rms_norm", "forward", "residual", torch.zeros_like, "0"),
    ("bias_gelu", "forward", "bias", _absent, "None"),
    ("bias_dropout", "forward", "seed", torch.zeros_like, "0"),
    ("bias_dropout_add", "forward", "residual", torch.zeros_like, "0"),
    ("swiglu", "forward", "up", torch.zeros_like, "0"),
    ("swiglu", "backward", "up", torch.zeros_like, "0"),
    ("attention", "forward", "mask", _absent, "None"),
    ("cross_entropy", "backward", "denominator", _absent, "None"),
    ("linear_cross_entropy", "forward", "bias", _absent, "None"),
):
    _fault = _in_place_of_freed(_name, _other)
    WRONG.append(
        Wrong(
            f"a freed {_name} is taken for {_text}", _op, _direction, "freed", lambda f=_fault: f, checks_storages=True
        )
    )


def _by_identity(name: str) -> Callable[[], Fault]:
    """Return a maker of kernels that keep the memory of each tensor that they have seen."""

    def make() -> Fault:
        kept: dict[int, Tensor] = {}

        def fault(run: Run, a: SimpleNamespace) -> Any:
            value = getattr(a, name)
            return run() if value is None else run(**{name: kept.setdefault(id(value), value.data)})

        return fault

    return make


for _op, _name in (
    ("rms_norm", "x"),
    ("layer_norm", "weight"),
    ("swiglu", "gate"),
    ("geglu", "up"),
    ("bias_gelu", "x"),
    ("attention", "k"),
    ("cross_entropy", "logits"),
    ("rotary_embedding", "cos"),
):
    stateful(f"the memory of {_name} is kept by the tensor's identity", _op, "backward", "swapped")(_by_identity(_name))
