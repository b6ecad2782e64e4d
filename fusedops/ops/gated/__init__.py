"""Gated activations: SwiGLU and GEGLU."""
