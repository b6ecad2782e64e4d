"""The CPU backend: kernels in C++, in a library that is built with the package where there is a compiler.

``optional``: what the library does not take, eager computes, without a report. Importing this package does not load
the library; the probe does.
"""

from __future__ import annotations

from typing import Any

import fusedops

_FAMILIES = {  # the ops by folder: each has a module of its name there
    "attention": (
        "attention",
        "merge_attention",
        "paged_attention",
        "select_keys",
        "sparse_attention",
        "store_kv",
        "varlen_attention",
    ),
    "bias": ("bias_dropout", "bias_dropout_add", "bias_gelu"),
    "convolution": ("causal_conv1d",),
    "experts": ("experts", "quantized_experts"),
    "gated": ("geglu", "swiglu"),
    "group_norm": ("group_norm",),
    "linear": ("linear",),
    "linear_attention": ("linear_attention",),
    "losses": ("cross_entropy", "linear_cross_entropy", "linear_log_probs"),
    "modulated": ("gated_add", "gated_add_modulated_norm", "modulated_norm"),
    "norms": ("add_layer_norm", "add_rms_norm", "gated_rms_norm", "layer_norm", "rms_norm"),
    "quantized": ("int8_linear", "quantized_linear"),
    "rotary": ("rotary_embedding",),
    "routing": ("top_k_routing",),
    "sampling": ("sample",),
    "softmax": ("scaled_masked_softmax",),
}

_FIX = (
    "install a platform wheel of fusedops; or install g++ or clang++, and install fusedops from source again with "
    "--force-reinstall --no-deps"
)


def _recorded_add(*args: Any, **kwargs: Any) -> Any:
    from fusedops_cpu.bias.bias_dropout_add import recorded_add

    return recorded_add(*args, **kwargs)


def _probe() -> fusedops.Unavailable | None:
    from fusedops_cpu.launch import library

    path = library.library_path()
    if not path.exists():
        built = path.with_name("no_library.txt")  # written where the library could not be compiled
        reason = f": {built.read_text('utf-8').strip()}" if built.exists() else ""
        return fusedops.Unavailable(f"this installation has no compiled library {path.name}{reason}", _FIX)
    try:
        library.library()
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
        kernels=fusedops.kernels_of(
            **{op: f"fusedops_cpu.{family}.{op}" for family, ops in _FAMILIES.items() for op in ops}
        ),
        probe=_probe,
        optional=True,
        records={"aten.add.Tensor": _recorded_add},
        needs="the compiled library, for x86-64 or aarch64",
        fusedops_api=2,
    )
