"""The Triton backend: NVIDIA and AMD GPUs, and CPU tensors under TRITON_INTERPRET=1 for tests and debugging.

Importing this package does not import triton. The first call imports the launchers and jit functions, which are in the
modules with a leading underscore.
"""

from __future__ import annotations

import os

import fusedops
from fusedops_triton.add_layer_norm import add_layer_norm, add_layer_norm_backward
from fusedops_triton.add_rms_norm import add_rms_norm, add_rms_norm_backward
from fusedops_triton.bias_dropout import bias_dropout, bias_dropout_backward
from fusedops_triton.bias_dropout_add import bias_dropout_add, bias_dropout_add_backward
from fusedops_triton.bias_gelu import bias_gelu, bias_gelu_backward
from fusedops_triton.cross_entropy import cross_entropy, cross_entropy_backward
from fusedops_triton.geglu import geglu, geglu_backward
from fusedops_triton.layer_norm import layer_norm, layer_norm_backward
from fusedops_triton.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_backward
from fusedops_triton.rms_norm import rms_norm, rms_norm_backward
from fusedops_triton.rotary_embedding import rotary_embedding, rotary_embedding_backward
from fusedops_triton.scaled_masked_softmax import scaled_masked_softmax, scaled_masked_softmax_backward
from fusedops_triton.swiglu import swiglu, swiglu_backward


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _probe() -> fusedops.Unavailable | None:
    try:
        import triton  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except Exception as error:  # a broken installation can raise other errors than ImportError
        return fusedops.Unavailable(
            f"import triton raised {type(error).__name__}: {error}", "pip install 'fusedops[triton]'"
        )
    import torch

    if not torch.cuda.is_available() and not _interpreted():
        return fusedops.Unavailable(
            "torch.cuda.is_available() is False",
            "install a CUDA or ROCm build of torch on a machine with a GPU, or set TRITON_INTERPRET=1 to run on a CPU",
        )
    return None


@fusedops.hookimpl
def fusedops_backend() -> fusedops.Backend:
    """Return the description of this backend; fusedops calls this hook."""
    interpreted = _interpreted()
    return fusedops.Backend(
        name="triton",
        device_types=("cuda", "cpu") if interpreted else ("cuda",),
        # the interpreter is thousands of times slower than eager, so it is selected only if a policy names it
        priority=-100 if interpreted else 100,
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
            cross_entropy,
            cross_entropy_backward,
            geglu,
            geglu_backward,
            rotary_embedding,
            rotary_embedding_backward,
            swiglu,
            swiglu_backward,
            linear_cross_entropy,
            linear_cross_entropy_backward,
        ),
        probe=_probe,
        needs="triton and an NVIDIA or AMD GPU",
        packages=("triton",),
        tools=("nvidia-smi", "rocm-smi"),
        variables=(("FUSEDOPS_AUTOTUNE", "1 times launch settings on this GPU and stores the fastest."),),
    )
