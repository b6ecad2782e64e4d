"""The eager backend: plain torch, any device, any shape. Fast on a CPU."""

import fusedops
from fusedops_eager import (
    add_layer_norm,
    add_rms_norm,
    attention,
    bias_dropout,
    bias_dropout_add,
    bias_gelu,
    causal_conv1d,
    cross_entropy,
    experts,
    gated_rms_norm,
    geglu,
    grouped_matmul,
    layer_norm,
    linear_attention,
    linear_cross_entropy,
    linear_log_probs,
    merge_attention,
    quantized_linear,
    rms_norm,
    rotary_embedding,
    scaled_masked_softmax,
    swiglu,
    top_k_routing,
    varlen_attention,
)


@fusedops.hookimpl
def fusedops_backend() -> fusedops.Backend:
    """Return the description of this backend; fusedops calls this hook."""
    return fusedops.Backend(
        name="eager",
        device_types=("*",),
        priority=0,
        kernels=fusedops.kernels_of(
            add_layer_norm,
            add_rms_norm,
            attention,
            bias_dropout,
            bias_dropout_add,
            bias_gelu,
            causal_conv1d,
            cross_entropy,
            experts,
            gated_rms_norm,
            geglu,
            grouped_matmul,
            layer_norm,
            linear_attention,
            linear_cross_entropy,
            linear_log_probs,
            merge_attention,
            quantized_linear,
            rms_norm,
            rotary_embedding,
            scaled_masked_softmax,
            swiglu,
            top_k_routing,
            varlen_attention,
        ),
        aliases=("torch",),
        needs="torch",
    )
