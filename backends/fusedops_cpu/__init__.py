"""The CPU backend: kernels in C++, in a library that is built with the package where there is a compiler.

``optional``: what the library does not take, eager computes, without a report. Importing this package does not load
the library; the probe does.
"""

from __future__ import annotations

import fusedops
from fusedops_cpu import (
    attention,
    bias,
    convolution,
    experts,
    gated,
    group_norm,
    linear,
    linear_attention,
    losses,
    modulated,
    norms,
    quantized,
    rotary,
    routing,
    sampling,
    softmax,
)
from fusedops_cpu.bias.bias_dropout_add import recorded_add

_FAMILIES = (
    attention,
    bias,
    convolution,
    experts,
    gated,
    group_norm,
    linear,
    linear_attention,
    losses,
    modulated,
    norms,
    quantized,
    rotary,
    routing,
    sampling,
    softmax,
)

_FIX = (
    "install a platform wheel of fusedops; or install g++ or clang++, and install fusedops from source again with "
    "--force-reinstall --no-deps"
)


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
        kernels=tuple(kernel for family in _FAMILIES for kernel in family.KERNELS),
        probe=_probe,
        optional=True,
        records={"aten.add.Tensor": recorded_add},
        needs="the compiled library, for x86-64 or aarch64",
        fusedops_api=2,
    )
