"""Attention, of packed sequences too, and the merge of two results."""
