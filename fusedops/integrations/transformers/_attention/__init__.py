"""The attention implementations, and the models that get them."""
