"""A small Llama-like decoder with experts, as Mixtral and Qwen3-MoE have them (Shazeer et al. 2017, arXiv:1701.06538).

Each block has a router and several gated MLPs, the experts, of which each token takes a few. As in llama.py, the
operations that have a fused form are an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import llama
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedops

BALANCE = 0.02  # the share of the balance loss in the loss


@dataclass(frozen=True)
class Ops(llama.Ops):
    """The operations of the model that have a fused form.

    Attributes:
        top_k_routing: logits (T, E) and K -> the weights of the chosen experts and their indices, (T, K) each.
        experts: x (T, W), index and weights (T, K), up (E, 2I, W) and down (E, W, I) -> (T, W).
    """

    top_k_routing: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    experts: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _plain_routing(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    weights, index = logits.softmax(-1).topk(k, -1)
    return weights / weights.sum(-1, keepdim=True), index


def _plain_experts(x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Loop over the experts as transformers does, each on the tokens that chose it."""
    y = torch.zeros_like(x)
    for e in range(up.shape[0]):
        token, choice = torch.where(index == e)
        gate, other = (x[token] @ up[e].T).chunk(2, -1)
        y.index_add_(0, token, ((F.silu(gate) * other) @ down[e].T) * weights[token, choice, None])
    return y


FUSED = Ops(
    **vars(llama.FUSED),
    top_k_routing=lambda logits, k: fusedops.top_k_routing(logits, k, normalize=True),
    experts=fusedops.experts,
)
PLAIN = Ops(**vars(llama.PLAIN), top_k_routing=_plain_routing, experts=_plain_experts)


class Mixture(nn.Module):
    """A router and its experts: (..., W) -> (..., W).

    Attributes:
        index: of the last call, the experts of each token, (T, K).
        balance: of the last call, the balance loss of Switch (Fedus et al. 2021, arXiv:2101.03961): 1 where each expert
            has the same share of the choices. Without it a few experts take most tokens.

    Args:
        width: size of the vector of a character.
        experts: their number.
        k: how many of them a token takes.
    """

    index: Tensor
    balance: Tensor

    def __init__(self, width: int, *, experts: int, k: int) -> None:
        super().__init__()
        inner = 4 * width // 3  # k = 2 take what the one MLP of llama.py does
        self.k = k
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.down = nn.Parameter(torch.empty(experts, width, inner))

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        tokens = x.flatten(0, -2)
        logits = self.router(tokens)
        weights, self.index = ops.top_k_routing(logits, self.k)
        self.balance = (self.load() * logits.softmax(-1).mean(0)).sum() * logits.shape[-1]
        return ops.experts(tokens, self.index, weights, self.up, self.down).view_as(x)

    def load(self) -> Tensor:
        """Return the share of each expert in the choices of the last call, (E,)."""
        return torch.bincount(self.index.flatten(), minlength=self.up.shape[0]) / self.index.numel()


class Moe(llama.Llama):
    """Compute the mean loss of predicting each next character, and BALANCE times the balance losses of the blocks.

    Args:
        vocabulary: number of different characters.
        ops: the fusable operations.
        experts: of each block.
        k: how many of them a token takes.
        **sizes: as of llama.Llama.
    """

    def __init__(self, vocabulary: int, ops: Ops, *, experts: int, k: int, **sizes: Any) -> None:
        super().__init__(vocabulary, ops, feed_forward=partial(Mixture, experts=experts, k=k), **sizes)

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        loss = super().forward(text, following)
        return loss + BALANCE * torch.stack([mixture.balance for mixture in self.mixtures()]).sum()

    def mixtures(self) -> list[Mixture]:
        """Return the mixture of each block."""
        return [module for module in self.modules() if isinstance(module, Mixture)]
