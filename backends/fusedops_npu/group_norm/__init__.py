"""GroupNorm."""
