"""Activations without a gate."""
