"""Modulated norms and gated residuals, the elementwise halves of the blocks of diffusion transformers."""
