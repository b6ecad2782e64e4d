"""Dropout of a sum: bias and dropout, with or without a residual."""
