"""Linear layers of packed weights."""
