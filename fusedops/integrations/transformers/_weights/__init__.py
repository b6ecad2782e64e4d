"""Packed weights, and the GGUF files that they come from."""
