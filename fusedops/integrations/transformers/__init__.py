"""fusedops in models of transformers, without a change to the model's code.

>>> import transformers
>>> from fusedops.integrations.transformers import apply
>>> sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64, "pad_token_id": 0}
>>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
>>> applied = apply(model)
>>> print(applied)
fusedops in LlamaForCausalLM: 1 cross_entropy, 2 rotary_embedding, 2 swiglu, 5 rms_norm, 2 attention
  module            op                count  left, because
  LlamaForCausalLM  cross_entropy     1
  LlamaAttention    rotary_embedding  2
  LlamaMLP          swiglu            2
  LlamaRMSNorm      rms_norm          5
  LlamaAttention    attention         2
>>> applied.remove()
"""

from fusedops.integrations._required import require

require("transformers", "5.22", "transformers")

from fusedops.integrations._applied import Applied as Applied
from fusedops.integrations._applied import Row as Row
from fusedops.integrations.transformers._apply import apply as apply
from fusedops.integrations.transformers._attention.functions import attention_forward as attention_forward
from fusedops.integrations.transformers._attention.functions import softmax_forward as softmax_forward
from fusedops.integrations.transformers._attention.implementation import register_attention
from fusedops.integrations.transformers._attention.packed_cache import quantized_cache as quantized_cache
from fusedops.integrations.transformers._attention.recorded_cache import recorded_cache as recorded_cache
from fusedops.integrations.transformers._kernels import Layer as Layer
from fusedops.integrations.transformers._kernels import Mapping as Mapping
from fusedops.integrations.transformers._kernels import mapping as mapping
from fusedops.integrations.transformers._sampling import seeded_sampling as seeded_sampling
from fusedops.integrations.transformers._weights.checkpoint import from_packed as from_packed
from fusedops.integrations.transformers._weights.gguf import from_gguf as from_gguf
from fusedops.integrations.transformers._weights.packed import quantize as quantize

__all__ = [
    "Applied",
    "Layer",
    "Mapping",
    "Row",
    "apply",
    "attention_forward",
    "from_gguf",
    "from_packed",
    "mapping",
    "quantize",
    "quantized_cache",
    "recorded_cache",
    "seeded_sampling",
    "softmax_forward",
]

register_attention()
