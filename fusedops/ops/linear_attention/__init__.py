"""The ops of linear attention and state space models."""
