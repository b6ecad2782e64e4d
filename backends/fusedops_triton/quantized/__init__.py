"""The linear layer with packed weights."""
