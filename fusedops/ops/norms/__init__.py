"""Normalisations: RMSNorm, LayerNorm, and both with a residual added first."""
