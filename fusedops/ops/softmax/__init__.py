"""Softmax of scaled and masked scores."""
