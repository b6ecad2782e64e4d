"""Linear layers of plain weights."""
