"""Random calls of every op on every backend, compared with float64: ``python -m tests.fuzz --minutes 5``.

Nothing here depends on the name of an op or of a backend: calls are made from an op's cases and constraints, and from
the constraints of a backend's kernels. Each call is a short program, which is what runs and what a failure prints.
"""
