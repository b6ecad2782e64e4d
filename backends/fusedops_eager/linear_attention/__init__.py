"""Linear attention."""
