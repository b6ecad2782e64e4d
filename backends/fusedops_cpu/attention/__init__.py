"""Attention, of packed sequences too, the merge of two results, and the choice of keys."""
