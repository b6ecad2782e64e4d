"""The calls of a whole model on a device that need not exist: the run without numbers, the decisions, the report."""
