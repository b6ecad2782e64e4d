"""How fast each provider of each op is, against a copy on the same machine in the same run. ``python -m benchmarks``."""
