"""A small Llama-like decoder. The fusable operations are an argument, so that two implementations can be compared.

RMSNorm, rotary position embedding, attention with fewer key heads than query heads, SwiGLU, and a loss that is computed
with the output layer: the parts of Llama 3 (arXiv:2407.21783), and of Qwen and Mistral models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedops

EPS = 1e-5


@dataclass(frozen=True)
class Ops:
    """The operations of the model that have a fused form.

    Attributes:
        rms_norm: x (..., W) and weight (W,) -> the norm.
        add_rms_norm: x, residual and weight -> the norm of the sum, and the sum.
        rotary_embedding: q (B, Nq, S, D), k (B, Nk, S, D), cos and sin (S, D/2) -> q and k, rotated.
        attention: q (B, Nq, S, D), k and v (B, Nk, S, D) -> (B, Nq, S, D); a query does not attend to later keys.
        swiglu: gate and up (B, S, H) -> silu(gate) * up.
        linear_cross_entropy: x (T, W), weight (V, W), target (T,) -> the mean loss.
    """

    rms_norm: Callable[[Tensor, Tensor], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    rotary_embedding: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    linear_cross_entropy: Callable[[Tensor, Tensor, Tensor], Tensor]


def _plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _plain_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _plain_rms_norm(total, weight), total


def _plain_rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


FUSED = Ops(
    lambda x, weight: fusedops.rms_norm(x, weight, EPS),
    lambda x, residual, weight: fusedops.add_rms_norm(x, residual, weight, EPS),
    fusedops.rotary_embedding,
    lambda q, k, v: fusedops.attention(q, k, v, causal=True),
    fusedops.swiglu,
    fusedops.linear_cross_entropy,
)
PLAIN = Ops(
    _plain_rms_norm,
    _plain_add_rms_norm,
    _plain_rotary_embedding,
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    lambda gate, up: F.silu(gate) * up,
    lambda x, weight, target: F.cross_entropy(x @ weight.T, target),
)


class Llama(nn.Module):
    """Compute the mean loss of predicting each next character: text and the next characters (B, S) int64 -> ().

    Args:
        vocabulary: number of different characters.
        ops: the fusable operations.
        layers: number of blocks.
        width: size of the vector of a character.
        heads: attention heads for queries; ``width / heads`` must be even.
        key_heads: heads for keys and values; divides ``heads``.
        feed_forward: makes what follows the attention of a block, from the width.
    """

    def __init__(
        self,
        vocabulary: int,
        ops: Ops,
        *,
        layers: int,
        width: int,
        heads: int,
        key_heads: int,
        feed_forward: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.head_size = width // heads
        self.embedding = nn.Embedding(vocabulary, width)
        make = feed_forward or GatedMLP
        self.blocks = nn.ModuleList(Block(width, heads, key_heads, make(width)) for _ in range(layers))
        self.norm = nn.Parameter(torch.ones(width))
        self.head = nn.Parameter(torch.empty(vocabulary, width))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.06)  # Llama has 0.02, for vectors much wider

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        ops = self.ops
        cos, sin = angles(text.shape[-1], self.head_size // 2, text.device)
        x, residual = self.embedding(text), None
        for block in self.blocks:
            x, residual = block(x, residual, cos, sin, ops)
        normed, _ = _add_and_norm(x, residual, self.norm, ops)
        return ops.linear_cross_entropy(normed.flatten(0, 1), self.head, following.flatten())


class Block(nn.Module):
    """Attention and a feed-forward. What each computes is added to its input by the norm that follows it."""

    def __init__(self, width: int, heads: int, key_heads: int, feed_forward: nn.Module) -> None:
        super().__init__()
        size = width // heads
        self.heads, self.key_heads = heads, key_heads
        self.attention_norm, self.feed_forward_norm = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.q, self.k, self.v = (nn.Linear(width, n * size, bias=False) for n in (heads, key_heads, key_heads))
        self.out = nn.Linear(width, width, bias=False)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        x, residual = _add_and_norm(x, residual, self.attention_norm, ops)
        x, residual = _add_and_norm(self._attention(x, cos, sin, ops), residual, self.feed_forward_norm, ops)
        return self.feed_forward(x, ops), residual

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor, ops: Ops) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            projected.view(batch, length, heads, -1).transpose(1, 2)
            for projected, heads in ((self.q(x), self.heads), (self.k(x), self.key_heads), (self.v(x), self.key_heads))
        )
        q, k = ops.rotary_embedding(q, k, cos, sin)
        return self.out(ops.attention(q, k, v).transpose(1, 2).reshape(batch, length, width))


class GatedMLP(nn.Module):
    """SwiGLU between two linear layers: (..., W) -> (..., W)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 8 * width // 3
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        return self.down(ops.swiglu(self.gate(x), self.up(x)))


def _add_and_norm(x: Tensor, residual: Tensor | None, weight: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
    """Return the norm of the sum, and the sum: the residual of what follows."""
    if residual is None:
        return ops.rms_norm(x, weight), x
    return ops.add_rms_norm(x, residual, weight)


@cache  # one per length
def angles(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    frequencies = 1000.0 ** -(torch.arange(size, device=device) / size)  # Llama 3 has 500000, for longer texts
    turns = torch.arange(length, device=device)[:, None] * frequencies
    return turns.cos(), turns.sin()
