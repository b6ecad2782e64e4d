"""The CPU backend: kernels in C++, in a library that is built with the package where there is a compiler.

``optional``: what the library does not take, eager computes, without a report. Importing this package does not load
the library; the probe does.
"""

from __future__ import annotations

import fusedops
from fusedops_cpu.add_layer_norm import add_layer_norm, add_layer_norm_backward
from fusedops_cpu.add_rms_norm import add_rms_norm, add_rms_norm_backward
from fusedops_cpu.bias_dropout import bias_dropout, bias_dropout_backward
from fusedops_cpu.bias_dropout_add import bias_dropout_add, bias_dropout_add_backward
from fusedops_cpu.bias_gelu import bias_gelu, bias_gelu_backward
from fusedops_cpu.cross_entropy import cross_entropy, cross_entropy_backward
from fusedops_cpu.geglu import geglu, geglu_backward
from fusedops_cpu.layer_norm import layer_norm, layer_norm_backward
from fusedops_cpu.rms_norm import rms_norm, rms_norm_backward
from fusedops_cpu.rotary_embedding import rotary_embedding, rotary_embedding_backward
from fusedops_cpu.scaled_masked_softmax import scaled_masked_softmax, scaled_masked_softmax_backward
from fusedops_cpu.swiglu import swiglu, swiglu_backward

_FIX = (
    "install a platform wheel of fusedops; or install a C++ compiler (g++ or clang++, or `pip install ziglang`) and "
    "install fusedops from source again"
)


def _probe() -> fusedops.Unavailable | None:
    from fusedops_cpu import _library

    path = _library.library_path()
    if not path.exists():
        return fusedops.Unavailable(f"this installation has no compiled library {path.name}", _FIX)
    try:
        _library.library()
    except (OSError, AttributeError) as error:
        return fusedops.Unavailable(f"the compiled library does not load: {error}", _FIX)
    return None


@fusedops.hookimpl
def fusedops_backend() -> fusedops.Backend:
    """Return the description of this backend; fusedops calls this hook."""
    return fusedops.Backend(
        name="cpu",
        device_types=("cpu",),
        priority=10,  # above eager
        kernels=(
            scaled_masked_softmax,
            scaled_masked_softmax_backward,
            bias_gelu,
            bias_gelu_backward,
            bias_dropout,
            bias_dropout_backward,
            bias_dropout_add,
            bias_dropout_add_backward,
            rms_norm,
            rms_norm_backward,
            add_rms_norm,
            add_rms_norm_backward,
            layer_norm,
            layer_norm_backward,
            add_layer_norm,
            add_layer_norm_backward,
            swiglu,
            swiglu_backward,
            geglu,
            geglu_backward,
            rotary_embedding,
            rotary_embedding_backward,
            cross_entropy,
            cross_entropy_backward,
        ),
        probe=_probe,
        optional=True,
        needs="the compiled library, for x86-64 or aarch64",
        fusedops_api=2,
    )
