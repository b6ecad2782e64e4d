"""The layers, by the names that transformers gives to its classes: for LayerRepository and LocalLayerRepository."""

from fusedops.integrations.transformers import Layer

RMSNorm = Layer("RMSNorm").load()
RMSNormZeroCentered = Layer("RMSNormZeroCentered").load()
SwiGLUMLP = Layer("SwiGLUMLP").load()
GeGLUMLP = Layer("GeGLUMLP").load()
rotary_pos_emb = Layer("rotary_pos_emb").load()
