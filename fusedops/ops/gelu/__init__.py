"""GELU of a sum: bias and GELU."""
