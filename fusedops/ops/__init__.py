"""The ops, one file each. To add one: a file beside this one, and one import below."""

import sys
from collections.abc import Callable
from typing import Any

import fusedops._dispatch.torch_library  # registers each new op with torch  # pyright: ignore  # noqa: F401
from fusedops._plugins.registry import registry
from fusedops.ops._add_layer_norm import add_layer_norm as add_layer_norm
from fusedops.ops._add_rms_norm import add_rms_norm as add_rms_norm
from fusedops.ops._attention import attention as attention
from fusedops.ops._bias_dropout import bias_dropout as bias_dropout
from fusedops.ops._bias_dropout_add import bias_dropout_add as bias_dropout_add
from fusedops.ops._bias_gelu import bias_gelu as bias_gelu
from fusedops.ops._cross_entropy import cross_entropy as cross_entropy
from fusedops.ops._geglu import geglu as geglu
from fusedops.ops._layer_norm import layer_norm as layer_norm
from fusedops.ops._linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from fusedops.ops._rms_norm import rms_norm as rms_norm
from fusedops.ops._rotary_embedding import rotary_embedding as rotary_embedding
from fusedops.ops._scaled_masked_softmax import scaled_masked_softmax as scaled_masked_softmax
from fusedops.ops._swiglu import swiglu as swiglu

OPS = registry.ops  # every op of this process by name, those of plugins included


def _public() -> dict[str, Callable[..., Any]]:
    """Return the public functions, which are the functions above, by name."""
    return {
        name: value
        for name, value in globals().items()
        if callable(value) and getattr(value, "__module__", "") == f"{__name__}._{name}"
    }


__all__ = [*_public()]  # pyright: ignore[reportUnsupportedDunderAll]
for _function in _public().values():
    registry.add_op(sys.modules[_function.__module__].OP)
