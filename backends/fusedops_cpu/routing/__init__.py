"""The routing of tokens to experts."""
