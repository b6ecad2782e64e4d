"""Attention: softmax of scores times values."""
