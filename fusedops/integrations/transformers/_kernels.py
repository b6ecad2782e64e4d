"""fusedops as layers of the package kernels, by the names that transformers' layers have there.

kernels makes the ``forward`` of a layer the forward of a module, so the layers here have no members but ``forward``,
and read the attributes of the module that they replace.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module

from fusedops import ops
from fusedops.integrations._trial.twin import cached_weakly
from fusedops.integrations.transformers._rotary.functions import RotaryFunction, Rotation, recognised_function


class _RMSNorm(Module):
    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != self.weight.dtype:  # the classes of this name differ in the dtype of the result
            cls = cast("Any", type(self))
            return cls.forward(self, hidden_states)
        return ops.rms_norm(hidden_states, self.weight, self.variance_epsilon)


class _RMSNormZeroCentered(Module):
    can_torch_compile = True
    has_backward = True

    def forward(self: Any, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, offset=1.0)


class _SwiGLUMLP(Module):
    can_torch_compile = True
    has_backward = True

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))


class _GeGLUMLP(Module):
    can_torch_compile = True
    has_backward = True

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(ops.geglu(self.gate_proj(x), self.up_proj(x)))


class _RotaryPosEmb(Module):
    can_torch_compile = True
    has_backward = True

    def forward(self: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        cls = cast("Any", type(self))
        form, own = _rotary_form(cls), partial(cls.forward, self)
        if form is None:  # another rotation of the same name
            return own(q, k, cos, sin, unsqueeze_dim)
        rotation, *rest = form
        return RotaryFunction(Rotation(*rotation), *rest)(own, q, k, cos, sin, unsqueeze_dim)


@torch.compiler.assume_constant_result
def _rotary_form(cls: type[Any]) -> Any:
    """Return the fields of the RotaryFunction that a function of transformers is, or None. Computed once for each."""
    return _rotary_fields(cls)


@cached_weakly
def _rotary_fields(cls: type[Any]) -> Any:
    found = recognised_function(object.__new__(cls), "rotary_pos_emb")
    return None if isinstance(found, str) else astuple(found)


_LAYERS: dict[str, type[Module]] = {
    "RMSNorm": _RMSNorm,
    "RMSNormZeroCentered": _RMSNormZeroCentered,
    "SwiGLUMLP": _SwiGLUMLP,
    "GeGLUMLP": _GeGLUMLP,
    "rotary_pos_emb": _RotaryPosEmb,
}


@dataclass(frozen=True)
class Layer:
    """A layer as kernels loads it. Nothing is downloaded.

    >>> Layer("RMSNorm").load().has_backward
    True
    """

    name: str

    def load(self) -> type[Module]:
        """Return the class whose forward becomes the module's."""
        return _LAYERS[self.name]

    def __str__(self) -> str:
        return f"fusedops, layer `{self.name}`"


class Mapping(dict[str, dict[str, Layer]]):
    """Layers by the name that kernels has for them and by device. ``print`` shows what they replace.

    >>> from fusedops.integrations.transformers import mapping
    >>> mapping().users["SwiGLUMLP"]
    ()
    """

    @property
    def users(self) -> dict[str, tuple[str, ...]]:
        """The classes and functions of the installed transformers that have each layer name.

        They are read from its source files, none of which is imported. A name without any is for classes elsewhere,
        such as those of a model's own repository.
        """
        return {name: _users().get(name, ()) for name in self}

    def __repr__(self) -> str:
        rows = [("layer", "used by", "such as")]
        for name, users in self.users.items():
            rows.append((name, str(len(users)) if users else "none", ", ".join(_shortest(users))))
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines = [f"  {one:{widths[0]}}  {two:>{widths[1]}}  {three}".rstrip() for one, two, three in rows]
        devices = ", ".join(dict.fromkeys(device for layers in self.values() for device in layers))
        return "\n".join(
            [
                f"fusedops for kernels, on {devices or 'no device'}, in transformers {_transformers_version()}",
                *lines,
                "A layer used by none replaces nothing in the models of transformers; apply() needs no layer names.",
                "fusedops.stats() counts the calls of a model.",
            ]
        )

    __str__ = __repr__


def _shortest(users: Iterable[str]) -> list[str]:
    """Return three examples, the shortest names, without their modules."""
    return sorted({user.rpartition(".")[2] for user in users}, key=lambda user: (len(user), user))[:3]


def _transformers_version() -> str:
    import transformers

    return str(transformers.__version__)


@cache
def _users() -> dict[str, tuple[str, ...]]:
    """Return the classes and functions of the installed transformers that have a layer name, by that name."""
    import transformers

    users: dict[str, list[str]] = {}
    for path in sorted(Path(transformers.__path__[0], "models").rglob("modeling_*.py")):
        for name, user in _DECORATED.findall(path.read_text(encoding="utf-8")):
            users.setdefault(name, []).append(f"{path.stem}.{user}")
    return {name: tuple(each) for name, each in users.items()}


# the decorator of a class or of a function, which may have others after it
_DECORATED = re.compile(r"""^@use_kernel_f\w+_from_hub\(["'](\w+)["']\)\n(?:@.*\n)*(?:class|def) (\w+)""", re.MULTILINE)


def mapping(devices: Iterable[str] = ("cpu", "cuda", "rocm", "npu", "xpu")) -> Mapping:
    """Return fusedops' layers for :func:`kernels.use_kernel_mapping` and ``register_kernel_mapping``.

    Each layer serves every mode of kernels, with gradients and under torch.compile. The op selects the backend for
    each call, so the layers of all devices are the same. ``print`` shows which classes of the installed transformers
    they replace: no class of transformers 5.22.2 has the names of the gated MLPs, which :func:`apply` recognises.

    Args:
        devices: the device types to map, as kernels names them.

    Returns:
        layers by the name that kernels has for them and by device.

    >>> from fusedops.integrations.transformers import mapping
    >>> layers = mapping(["cpu", "npu"])
    >>> sorted(layers)
    ['GeGLUMLP', 'RMSNorm', 'RMSNormZeroCentered', 'SwiGLUMLP', 'rotary_pos_emb']
    >>> "modeling_llama.LlamaRMSNorm" in layers.users["RMSNorm"]
    True
    """
    names = tuple(devices)
    return Mapping({name: dict.fromkeys(names, Layer(name)) for name in _LAYERS})
