"""The losses."""
