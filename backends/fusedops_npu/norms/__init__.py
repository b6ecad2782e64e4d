"""RMSNorm and LayerNorm, with a residual or a gate."""
