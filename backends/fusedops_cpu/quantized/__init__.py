"""The linear layers with packed weights."""
