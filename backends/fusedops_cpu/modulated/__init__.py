"""Modulated norms and gated residuals."""
