"""Routers of experts: the choice and the weights that they compute, as arguments of top_k_routing."""
