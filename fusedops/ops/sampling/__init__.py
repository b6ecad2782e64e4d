"""The draw of a token from the logits of a language model."""
