"""Functions that the jit functions of several families call."""
