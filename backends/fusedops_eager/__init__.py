"""The eager backend: plain torch, any device, any shape. Fast on a CPU."""

import fusedops
from fusedops_eager.add_layer_norm import add_layer_norm, add_layer_norm_backward
from fusedops_eager.add_rms_norm import add_rms_norm, add_rms_norm_backward
from fusedops_eager.attention import attention, attention_backward
from fusedops_eager.bias_dropout import bias_dropout, bias_dropout_backward
from fusedops_eager.bias_dropout_add import bias_dropout_add, bias_dropout_add_backward
from fusedops_eager.bias_gelu import bias_gelu, bias_gelu_backward
from fusedops_eager.cross_entropy import cross_entropy, cross_entropy_backward
from fusedops_eager.geglu import geglu, geglu_backward
from fusedops_eager.layer_norm import layer_norm, layer_norm_backward
from fusedops_eager.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_backward
from fusedops_eager.rms_norm import rms_norm, rms_norm_backward
from fusedops_eager.rotary_embedding import rotary_embedding, rotary_embedding_backward
from fusedops_eager.scaled_masked_softmax import scaled_masked_softmax, scaled_masked_softmax_backward
from fusedops_eager.swiglu import swiglu, swiglu_backward


@fusedops.hookimpl
def fusedops_backend() -> fusedops.Backend:
    """Return the description of this backend; fusedops calls this hook."""
    return fusedops.Backend(
        name="eager",
        device_types=("*",),
        priority=0,
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
            attention,
            attention_backward,
        ),
        needs="torch",
    )
