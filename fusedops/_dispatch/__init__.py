"""The path of a call: the plan, the selection, fallback, autograd, and the ways in from torch."""
