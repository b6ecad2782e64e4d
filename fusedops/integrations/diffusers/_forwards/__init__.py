"""Forwards with other calls in them: their source is read, changed and compiled."""
