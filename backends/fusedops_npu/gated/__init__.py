"""Gated activations."""
