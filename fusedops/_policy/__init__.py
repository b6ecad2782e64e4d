"""Policies: which backends are preferred, per op, and how a fallback is reported."""
