"""Losses: cross entropy of logits, and of a linear layer."""
