"""GroupNorm with the activation after it, the norm of convolutional diffusion models and autoencoders."""
