"""The speed of each provider of each op, compared with a copy in the same run. ``python -m benchmarks``."""
