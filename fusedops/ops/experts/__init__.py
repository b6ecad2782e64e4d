"""Mixtures of experts: the experts of each token, as one op."""
