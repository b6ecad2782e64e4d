"""The routing of a mixture of experts: the choice of a router, as one op."""
