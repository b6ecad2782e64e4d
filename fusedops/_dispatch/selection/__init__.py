"""The selection of a backend: the plan for a policy, fallbacks, the decision in full, and counts of calls."""
