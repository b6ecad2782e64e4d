"""A bias with GELU or dropout."""
