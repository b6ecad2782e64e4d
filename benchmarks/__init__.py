"""How fast each provider of each op is, against a copy in the same run. ``python -m benchmarks``."""
