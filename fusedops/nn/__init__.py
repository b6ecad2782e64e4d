"""The ops as modules, for models that are built of modules. The norms and the loss have parameters, named as torch's.

>>> import torch, fusedops
>>> fusedops.nn.ScaledMaskedSoftmax(scale=0.125, causal=True)(torch.zeros(1, 2, 2))
tensor([[[1.0000, 0.0000],
         [0.5000, 0.5000]]])
"""

from fusedops.nn._attention import Attention as Attention
from fusedops.nn._gated import GEGLU as GEGLU
from fusedops.nn._gated import SwiGLU as SwiGLU
from fusedops.nn._losses import CrossEntropyLoss as CrossEntropyLoss
from fusedops.nn._losses import LinearCrossEntropyLoss as LinearCrossEntropyLoss
from fusedops.nn._mixers import GatedDeltaNet as GatedDeltaNet
from fusedops.nn._mixers import Mamba2 as Mamba2
from fusedops.nn._mixers import MixerState as MixerState
from fusedops.nn._norms import LayerNorm as LayerNorm
from fusedops.nn._norms import RMSNorm as RMSNorm
from fusedops.nn._quantized import QuantizedEmbedding as QuantizedEmbedding
from fusedops.nn._quantized import QuantizedLinear as QuantizedLinear
from fusedops.nn._stateless import BiasDropoutAdd as BiasDropoutAdd
from fusedops.nn._stateless import BiasGELU as BiasGELU
from fusedops.nn._stateless import ScaledMaskedSoftmax as ScaledMaskedSoftmax

__all__ = [
    "GEGLU",
    "Attention",
    "BiasDropoutAdd",
    "BiasGELU",
    "CrossEntropyLoss",
    "GatedDeltaNet",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "Mamba2",
    "MixerState",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "RMSNorm",
    "ScaledMaskedSoftmax",
    "SwiGLU",
]
