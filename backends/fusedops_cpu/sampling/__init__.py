"""The draw of a token from logits."""
