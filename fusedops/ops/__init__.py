"""The ops, one folder for each family. To add one: a file in a folder, an import and an entry of ``__all__`` here."""

import sys

from fusedops._dispatch.registered.registration import register_op, unregister_op
from fusedops._plugins.registry import registry
from fusedops._policy.context import drop_plans
from fusedops.ops.attention.attention import attention as attention
from fusedops.ops.attention.merge_attention import merge_attention as merge_attention
from fusedops.ops.attention.paged_attention import paged_attention as paged_attention
from fusedops.ops.attention.select_keys import select_keys as select_keys
from fusedops.ops.attention.sparse_attention import sparse_attention as sparse_attention
from fusedops.ops.attention.store_kv import store_kv as store_kv
from fusedops.ops.attention.varlen_attention import varlen_attention as varlen_attention
from fusedops.ops.bias.bias_dropout import bias_dropout as bias_dropout
from fusedops.ops.bias.bias_dropout_add import bias_dropout_add as bias_dropout_add
from fusedops.ops.bias.bias_gelu import bias_gelu as bias_gelu
from fusedops.ops.convolution.causal_conv1d import causal_conv1d as causal_conv1d
from fusedops.ops.experts.experts import experts as experts
from fusedops.ops.experts.grouped_matmul import grouped_matmul as grouped_matmul
from fusedops.ops.experts.quantized_experts import quantized_experts as quantized_experts
from fusedops.ops.gated.geglu import geglu as geglu
from fusedops.ops.gated.swiglu import swiglu as swiglu
from fusedops.ops.group_norm.group_norm import group_norm as group_norm
from fusedops.ops.linear.linear import linear as linear
from fusedops.ops.linear_attention.linear_attention import linear_attention as linear_attention
from fusedops.ops.losses.cross_entropy import cross_entropy as cross_entropy
from fusedops.ops.losses.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from fusedops.ops.losses.linear_log_probs import linear_log_probs as linear_log_probs
from fusedops.ops.modulated.gated_add import gated_add as gated_add
from fusedops.ops.modulated.gated_add_modulated_norm import gated_add_modulated_norm as gated_add_modulated_norm
from fusedops.ops.modulated.modulated_norm import modulated_norm as modulated_norm
from fusedops.ops.norms.add_layer_norm import add_layer_norm as add_layer_norm
from fusedops.ops.norms.add_rms_norm import add_rms_norm as add_rms_norm
from fusedops.ops.norms.gated_rms_norm import gated_rms_norm as gated_rms_norm
from fusedops.ops.norms.layer_norm import layer_norm as layer_norm
from fusedops.ops.norms.rms_norm import rms_norm as rms_norm
from fusedops.ops.quantized.int8_linear import int8_linear as int8_linear
from fusedops.ops.quantized.quantized_linear import quantized_linear as quantized_linear
from fusedops.ops.rotary.rotary_embedding import rotary_embedding as rotary_embedding
from fusedops.ops.routing.top_k_routing import top_k_routing as top_k_routing
from fusedops.ops.sampling.sample import sample as sample
from fusedops.ops.softmax.scaled_masked_softmax import scaled_masked_softmax as scaled_masked_softmax

# As fusedops.ops.attention is the function, import from the folder of this name: from fusedops.ops.attention import ...
__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "bias_dropout",
    "bias_dropout_add",
    "bias_gelu",
    "causal_conv1d",
    "cross_entropy",
    "experts",
    "gated_add",
    "gated_add_modulated_norm",
    "gated_rms_norm",
    "geglu",
    "group_norm",
    "grouped_matmul",
    "int8_linear",
    "layer_norm",
    "linear",
    "linear_attention",
    "linear_cross_entropy",
    "linear_log_probs",
    "merge_attention",
    "modulated_norm",
    "paged_attention",
    "quantized_experts",
    "quantized_linear",
    "rms_norm",
    "rotary_embedding",
    "sample",
    "scaled_masked_softmax",
    "select_keys",
    "sparse_attention",
    "store_kv",
    "swiglu",
    "top_k_routing",
    "varlen_attention",
]
registry.on_change.append(drop_plans)
registry.on_new_op.append(register_op)
registry.on_removed_op.append(unregister_op)
for _name in __all__:  # the module of each function has the op
    registry.add_op(sys.modules[globals()[_name].__module__].OP)

OPS = registry.ops  # every op of this process by name, those of plugins included
