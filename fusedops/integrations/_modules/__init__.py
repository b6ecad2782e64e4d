"""Norms, gated MLPs, activations and linear layers: how they are recognised, and what replaces them."""
