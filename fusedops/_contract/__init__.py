"""The data model: what an op, a constraint, a kernel and a backend are. No state."""
