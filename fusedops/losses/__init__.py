"""Losses of preferences, of reinforcement learning and of distillation: plain torch on log probabilities.

``dpo_loss`` and ``grpo_loss`` take the log probabilities of :func:`fusedops.linear_log_probs`, a number of a token or
of a sequence, and have no kernels. ``kl_divergence`` takes two last layers, whose logits never exist for all rows.
"""

from fusedops.losses._distillation import kl_divergence as kl_divergence
from fusedops.losses._policy_gradient import grpo_loss as grpo_loss
from fusedops.losses._preferences import dpo_loss as dpo_loss

__all__ = ["dpo_loss", "grpo_loss", "kl_divergence"]
