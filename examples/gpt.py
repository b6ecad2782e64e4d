"""A small character-level GPT. The fusable operations are an argument, so that two implementations can be compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import inf

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedops
from fusedops import testing


@dataclass(frozen=True)
class Ops:
    """The operations of a block that have a fused form.

    Attributes:
        attention: q, k and v (B, H, S, D) -> (B, H, S, D); a query does not attend to later keys.
        bias_gelu: x (B, S, W) and bias (W,) -> gelu(x + bias), tanh form.
        bias_dropout_add: x, bias, residual, p, training, seed -> residual + dropout(x + bias).
        rotary_embedding: q and k (B, H, S, D), cos and sin (S, D/2) -> q and k, rotated.
    """

    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    bias_gelu: Callable[[Tensor, Tensor], Tensor]
    bias_dropout_add: Callable[[Tensor, Tensor, Tensor, float, bool, int | None], Tensor]
    rotary_embedding: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fusedops.attention(q, k, v, causal=True)


def _plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _fused_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fusedops.scaled_masked_softmax(q @ k.transpose(-2, -1), None, q.shape[-1] ** -0.5, causal=True) @ v


def _plain_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(_later_keys(scores.shape[-1], scores.device), -inf), dim=-1) @ v


def _plain_bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def _fused_bias_dropout_add(
    x: Tensor, bias: Tensor, residual: Tensor, p: float, training: bool, seed: int | None
) -> Tensor:
    return fusedops.bias_dropout_add(x, bias, residual, p, training=training, seed=seed)


def _plain_bias_dropout_add(
    x: Tensor, bias: Tensor, residual: Tensor, p: float, training: bool, seed: int | None
) -> Tensor:
    if seed is None or not training:
        return residual + F.dropout(x + bias, p, training)
    # the mask of fusedops for this seed, which is the same on every backend, so that the two models can be compared
    keep = testing.keep_mask(torch.tensor([seed], device=x.device), p, x.shape)
    return residual + torch.where(keep, (x + bias) / (1 - p), 0)


def _plain_rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@cache  # one per length; without the cache, the comparison with plain torch would be unfair
def _later_keys(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


FUSED = Ops(_fused_attention, fusedops.bias_gelu, _fused_bias_dropout_add, fusedops.rotary_embedding)
PLAIN = Ops(_plain_attention, _plain_bias_gelu, _plain_bias_dropout_add, _plain_rotary_embedding)
# the same with the scores of all queries and keys in memory
FUSED_SOFTMAX, PLAIN_SOFTMAX = replace(FUSED, attention=_fused_softmax), replace(PLAIN, attention=_plain_softmax)


class GPT(nn.Module):
    """Compute the scores of the next character for each character: (B, S) int64 -> (B, S, vocabulary).

    Args:
        vocabulary: number of different characters.
        ops: the fusable operations; can be replaced between two calls.
        layers: number of blocks.
        width: size of the vector of a character.
        heads: attention heads of a block; ``width / heads`` must be even.
        dropout: probability, in training, of dropping an element of the outputs that a block adds to its input.
    """

    def __init__(self, vocabulary: int, ops: Ops, *, layers: int, width: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.ops = ops
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.06)  # GPT-2 has 0.02, for vectors eight times as wide

    def forward(self, text: Tensor, seed: int | None = None) -> Tensor:
        """Compute the scores. Dropouts use consecutive seeds from ``seed``. None: torch's generator draws the seeds."""
        x = self.embedding(text)
        for index, block in enumerate(self.blocks):
            x = block(x, self.ops, None if seed is None else seed + 2 * index)
        return self.head(self.norm(x))


class Block(nn.Module):
    """Attention and a two-layer perceptron. Each output is added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, ops: Ops, seed: int | None) -> Tensor:
        seeds = (None, None) if seed is None else (seed, seed + 1)
        # linear without the biases, which the fused operations add
        heads, out = self.attention(self.norm_1(x), ops), self.attention.out
        x = ops.bias_dropout_add(F.linear(heads, out.weight), out.bias, x, self.dropout, self.training, seeds[0])
        wide = ops.bias_gelu(F.linear(self.norm_2(x), self.up.weight), self.up.bias)
        narrow = F.linear(wide, self.down.weight)
        return ops.bias_dropout_add(narrow, self.down.bias, x, self.dropout, self.training, seeds[1])


class Attention(nn.Module):
    """Causal self-attention. The block applies ``out``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        batch, length, width = x.shape
        # q, k and v of a head are adjacent, so that qkv can be split between heads; each becomes (B, H, S, D)
        q, k, v = self.qkv(x).view(batch, length, self.heads, 3, -1).permute(3, 0, 2, 1, 4)
        # positions by rotation, so that scores depend on the distance: RoPE, Su et al. 2021. A table of trained
        # positions needs about three times as many steps for the same loss
        q, k = ops.rotary_embedding(q, k, *_angles(length, q.shape[-1] // 2, q.device))
        return ops.attention(q, k, v).transpose(1, 2).reshape(batch, length, width)


@cache  # one per length
def _angles(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    frequencies = 1000.0 ** -(torch.arange(size, device=device) / size)  # 10000 is usual, for longer texts
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()
