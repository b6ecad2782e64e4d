"""Experts and gated norms: how they are recognised, and what replaces them."""
