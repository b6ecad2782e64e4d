"""Instruction sets, dtypes, tensors, calls on rows and comparison of the cpu backend's tests."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LEVELS = {"DEFAULT": "x86-64-v2", "AVX2": "x86-64-v3", "AVX512": "x86-64-v4"}  # of -march, by torch's capability
X86 = platform.machine().lower() in ("x86_64", "amd64")
#: The capabilities that this processor has.
RUNS = [*LEVELS][: 1 + [*LEVELS].index(torch.backends.cpu.get_cpu_capability())] if X86 else []

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1.2e-3}


def rounded(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got: Tensor, wanted: Tensor, scale: float = 1.0) -> None:
    assert got.shape == wanted.shape
    assert got.is_contiguous()
    tolerance = TOLERANCE[got.dtype] * scale
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


Rows = Callable[[Tensor, Tensor, Tensor], tuple[Any, ...]]
# arguments for x, another tensor of its shape, and a vector for its rows; options. A name is the op's, and what differs
CALLS: dict[str, tuple[Rows, dict[str, Any]]] = {
    "scaled_masked_softmax": (lambda x, one, row: (x, one > 0.5, 0.7), {}),
    "scaled_masked_softmax, causal": (lambda x, one, row: (x, row > 0, 0.5), {"causal": True}),
    "bias_gelu": (lambda x, one, row: (x, row), {}),
    "bias_dropout_add": (lambda x, one, row: (x, row, one, 0.1), {"seed": 4}),
    "rms_norm": (lambda x, one, row: (x, row, 1e-3), {}),
    "add_rms_norm": (lambda x, one, row: (x, one, row, 1e-3), {}),
    "layer_norm": (lambda x, one, row: (x, row, row, 1e-3), {}),
    "add_layer_norm": (lambda x, one, row: (x, one, row, row, 1e-3), {}),
    "swiglu": (lambda x, one, row: (x, one), {}),
    "geglu": (lambda x, one, row: (x, one), {}),
    "gated_rms_norm": (lambda x, one, row: (x, one, row, 1e-3), {}),
    "gated_rms_norm, gate first": (lambda x, one, row: (x, one, row, 1e-3), {"gate_first": True}),
    "cross_entropy": (lambda x, one, row: (x, _classes(x)), {"z_loss": 0.1}),
    "cross_entropy, rows": (lambda x, one, row: (x, _classes(x)), {"reduction": "none", "label_smoothing": 0.1}),
    "top_k_routing": (lambda x, one, row: (x, 3), {"normalize": True}),
    "top_k_routing, sigmoid": (lambda x, one, row: (x, 3), {"score": "sigmoid", "scale": 2.5}),
    "rotary_embedding": (lambda x, one, row: _rotated(x, one), {}),
    "rotary_embedding, pairs": (lambda x, one, row: _rotated(x, one), {"interleaved": True}),
}


def call_of(name: str, shape: tuple[int, int], dtype: torch.dtype) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Return the op of one of these calls, its arguments and its options."""
    make, options = CALLS[name]
    x, one, row = rounded(shape, dtype), rounded(shape, dtype, 1), rounded(shape[1:], dtype, 3)
    return name.partition(",")[0], make(x, one, row), options


def _classes(x: Tensor) -> Tensor:
    target = torch.arange(len(x)) % x.shape[-1]
    target[::3] = -100
    return target


def _rotated(x: Tensor, angles: Tensor) -> tuple[Any, ...]:
    half = angles[:, : x.shape[1] // 2]
    return x[None], None, half, half.flip(0)
