"""The causal convolution."""
