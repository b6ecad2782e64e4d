"""Losses: cross entropy of logits, and of a linear layer; the log probabilities of the latter."""
