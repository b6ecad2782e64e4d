"""fusedops in Megatron-core: a layer spec, and a patch of the functions that no spec reaches.

>>> from fusedops.integrations.megatron import get_gpt_layer_spec, patch
>>> spec = get_gpt_layer_spec(normalization="RMSNorm")  # for GPTModel(transformer_layer_spec=)
>>> spec.submodules.self_attention.submodules.core_attention
<class 'fusedops.integrations.megatron._attention.CoreAttention'>
>>> patched = patch(ops=["swiglu", "cross_entropy"])
>>> [(row.module, row.op) for row in patched.rows if row.op == "swiglu"]
[('bias_swiglu_impl', 'swiglu')]
>>> patched.remove()
"""

from fusedops.integrations._required import require

require("megatron-core", "0.16", "megatron")

from fusedops.integrations._applied import Applied as Applied
from fusedops.integrations._applied import Row as Row
from fusedops.integrations.megatron._attention import CoreAttention as CoreAttention
from fusedops.integrations.megatron._mlp import MLP as MLP
from fusedops.integrations.megatron._norms import L2Norm as L2Norm
from fusedops.integrations.megatron._norms import Norm as Norm
from fusedops.integrations.megatron._patch import patch as patch
from fusedops.integrations.megatron._spec import GPTLayerSpec as GPTLayerSpec
from fusedops.integrations.megatron._spec import get_gpt_block_spec as get_gpt_block_spec
from fusedops.integrations.megatron._spec import get_gpt_layer_spec as get_gpt_layer_spec

__all__ = [
    "Applied",
    "CoreAttention",
    "GPTLayerSpec",
    "L2Norm",
    "MLP",
    "Norm",
    "Row",
    "get_gpt_block_spec",
    "get_gpt_layer_spec",
    "patch",
]
