"""What the jit functions of several families share."""
