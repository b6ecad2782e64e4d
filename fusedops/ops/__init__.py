"""The ops, one folder for each family. To add one: a file in a folder, two imports and an entry of ``_OWN`` here."""

from fusedops._dispatch.registered.registration import register_op, unregister_op
from fusedops._plugins.registry import registry
from fusedops._policy.context import drop_plans
from fusedops.ops.attention.attention import OP as _ATTENTION
from fusedops.ops.attention.attention import attention as attention
from fusedops.ops.attention.merge_attention import OP as _MERGE_ATTENTION
from fusedops.ops.attention.merge_attention import merge_attention as merge_attention
from fusedops.ops.attention.varlen_attention import OP as _VARLEN_ATTENTION
from fusedops.ops.attention.varlen_attention import varlen_attention as varlen_attention
from fusedops.ops.bias.bias_dropout import OP as _BIAS_DROPOUT
from fusedops.ops.bias.bias_dropout import bias_dropout as bias_dropout
from fusedops.ops.bias.bias_dropout_add import OP as _BIAS_DROPOUT_ADD
from fusedops.ops.bias.bias_dropout_add import bias_dropout_add as bias_dropout_add
from fusedops.ops.bias.bias_gelu import OP as _BIAS_GELU
from fusedops.ops.bias.bias_gelu import bias_gelu as bias_gelu
from fusedops.ops.convolution.causal_conv1d import OP as _CAUSAL_CONV1D
from fusedops.ops.convolution.causal_conv1d import causal_conv1d as causal_conv1d
from fusedops.ops.experts.experts import OP as _EXPERTS
from fusedops.ops.experts.experts import experts as experts
from fusedops.ops.experts.grouped_matmul import OP as _GROUPED_MATMUL
from fusedops.ops.experts.grouped_matmul import grouped_matmul as grouped_matmul
from fusedops.ops.gated.geglu import OP as _GEGLU
from fusedops.ops.gated.geglu import geglu as geglu
from fusedops.ops.gated.swiglu import OP as _SWIGLU
from fusedops.ops.gated.swiglu import swiglu as swiglu
from fusedops.ops.linear_attention.linear_attention import OP as _LINEAR_ATTENTION
from fusedops.ops.linear_attention.linear_attention import linear_attention as linear_attention
from fusedops.ops.losses.cross_entropy import OP as _CROSS_ENTROPY
from fusedops.ops.losses.cross_entropy import cross_entropy as cross_entropy
from fusedops.ops.losses.linear_cross_entropy import OP as _LINEAR_CROSS_ENTROPY
from fusedops.ops.losses.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from fusedops.ops.losses.linear_log_probs import OP as _LINEAR_LOG_PROBS
from fusedops.ops.losses.linear_log_probs import linear_log_probs as linear_log_probs
from fusedops.ops.norms.add_layer_norm import OP as _ADD_LAYER_NORM
from fusedops.ops.norms.add_layer_norm import add_layer_norm as add_layer_norm
from fusedops.ops.norms.add_rms_norm import OP as _ADD_RMS_NORM
from fusedops.ops.norms.add_rms_norm import add_rms_norm as add_rms_norm
from fusedops.ops.norms.gated_rms_norm import OP as _GATED_RMS_NORM
from fusedops.ops.norms.gated_rms_norm import gated_rms_norm as gated_rms_norm
from fusedops.ops.norms.layer_norm import OP as _LAYER_NORM
from fusedops.ops.norms.layer_norm import layer_norm as layer_norm
from fusedops.ops.norms.rms_norm import OP as _RMS_NORM
from fusedops.ops.norms.rms_norm import rms_norm as rms_norm
from fusedops.ops.quantized.quantized_linear import OP as _QUANTIZED_LINEAR
from fusedops.ops.quantized.quantized_linear import quantized_linear as quantized_linear
from fusedops.ops.rotary.rotary_embedding import OP as _ROTARY_EMBEDDING
from fusedops.ops.rotary.rotary_embedding import rotary_embedding as rotary_embedding
from fusedops.ops.routing.top_k_routing import OP as _TOP_K_ROUTING
from fusedops.ops.routing.top_k_routing import top_k_routing as top_k_routing
from fusedops.ops.softmax.scaled_masked_softmax import OP as _SCALED_MASKED_SOFTMAX
from fusedops.ops.softmax.scaled_masked_softmax import scaled_masked_softmax as scaled_masked_softmax

# As fusedops.ops.attention is the function, import from the folder of this name: from fusedops.ops.attention import ...
_OWN = (
    _ADD_LAYER_NORM,
    _ADD_RMS_NORM,
    _ATTENTION,
    _BIAS_DROPOUT,
    _BIAS_DROPOUT_ADD,
    _BIAS_GELU,
    _CAUSAL_CONV1D,
    _CROSS_ENTROPY,
    _EXPERTS,
    _GATED_RMS_NORM,
    _GEGLU,
    _GROUPED_MATMUL,
    _LAYER_NORM,
    _LINEAR_ATTENTION,
    _LINEAR_CROSS_ENTROPY,
    _LINEAR_LOG_PROBS,
    _MERGE_ATTENTION,
    _QUANTIZED_LINEAR,
    _RMS_NORM,
    _ROTARY_EMBEDDING,
    _SCALED_MASKED_SOFTMAX,
    _SWIGLU,
    _TOP_K_ROUTING,
    _VARLEN_ATTENTION,
)
registry.on_change.append(drop_plans)
registry.on_new_op.append(register_op)
registry.on_removed_op.append(unregister_op)
for _op in _OWN:
    registry.add_op(_op)

OPS = registry.ops  # every op of this process by name, those of plugins included
__all__ = [op.name for op in _OWN]  # pyright: ignore[reportUnsupportedDunderAll]
