"""Ops on a sum with a bias: GELU, and dropout with or without a residual."""
