"""Norms, gated MLPs, activations and experts: what they look like, and what replaces them."""
