"""The calls that ``benchmarks.cpu_sizes`` measures, each with the chain of torch calls that a model would use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import fusedops
import fusedops_cpu
from fusedops_cpu.losses import cross_entropy as losses

Turn = Callable[[], object]


class Work(NamedTuple):
    """One call in the forms that are measured.

    Attributes:
        plain: computes the same in plain torch.
        args, options: the arguments of the public function.
        kernel: the cpu backend's function, which selects nothing.
        leaves: the tensors that take gradients.
    """

    plain: Turn
    args: tuple[Any, ...]
    options: dict[str, Any]
    kernel: Turn
    leaves: list[Tensor]


def softmax(n: int, dtype: torch.dtype, form: str) -> Work:
    """Return the work of scaled_masked_softmax on n scores."""
    kernel = fusedops_cpu.softmax.scaled_masked_softmax.scaled_masked_softmax
    sk = min(1024, 1 << (n.bit_length() // 2))
    sq = min(n // sk, 512)
    x = torch.randn(n // sk // sq, sq, sk).to(dtype)
    causal = form == "causal"
    upper = torch.ones(sq, sk, dtype=torch.bool).triu(1)
    random = torch.rand(1, sq, sk) < 1 / 3
    random[..., 0] = False
    masked = {"none": None, "causal": upper, "mask": random}[form]
    mask = random if form == "mask" else None

    def plain() -> Tensor:
        scores = x * 0.125
        return torch.softmax(scores if masked is None else scores.masked_fill(masked, float("-inf")), -1)

    return Work(
        plain,
        (x, mask, 0.125),
        {"causal": causal},
        lambda: kernel.call(x, mask, 0.125, causal),
        [x],
    )


def rows(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, bias and residual."""
    columns = min(4096, max(64, 1 << (n.bit_length() // 2)))
    shape = (n // columns, columns)
    return torch.randn(shape).to(dtype), torch.randn(columns).to(dtype), torch.randn(shape).to(dtype)


def gelu(n: int, dtype: torch.dtype, form: str) -> Work:
    """Return the same for bias_gelu."""
    kernel = fusedops_cpu.bias.bias_gelu.bias_gelu
    x, bias, _ = rows(n, dtype)
    return Work(
        lambda: F.gelu(x + bias, approximate=form),
        (x, bias),
        {"approximate": form},
        lambda: kernel.call(x, bias, form),
        [x, bias],
    )


def dropout(n: int, dtype: torch.dtype, form: str) -> Work:
    """Return the same for bias_dropout. The public call draws a seed, the kernel is given one."""
    kernel = fusedops_cpu.bias.bias_dropout.bias_dropout
    x, bias, _ = rows(n, dtype)
    seed, training = torch.tensor([1]), form == "training"
    return Work(
        lambda: F.dropout(x + bias, 0.1, training),
        (x, bias, 0.1),
        {"training": training},
        lambda: kernel.call(x, bias, 0.1, training, seed if training else None),
        [x, bias],
    )


def dropout_add(n: int, dtype: torch.dtype, form: str) -> Work:
    """Return the same for bias_dropout_add."""
    kernel = fusedops_cpu.bias.bias_dropout_add.bias_dropout_add
    x, bias, residual = rows(n, dtype)
    seed, training = torch.tensor([1]), form == "training"
    return Work(
        lambda: residual + F.dropout(x + bias, 0.1, training),
        (x, bias, residual, 0.1),
        {"training": training},
        lambda: kernel.call(x, bias, residual, 0.1, training, seed if training else None),
        [x, bias, residual],
    )


def norm(n: int, dtype: torch.dtype, form: str) -> Work:
    """Return the same for rms_norm and layer_norm, with a weight (and a bias)."""
    x, weight, _ = rows(n, dtype)
    shape, bias = x.shape[-1:], torch.randn_like(weight)
    if form == "rms":
        return Work(
            lambda: F.rms_norm(x, shape, weight, 1e-6),
            (x, weight),
            {},
            lambda: fusedops_cpu.norms.rms_norm.rms_norm.call(x, weight, 1e-6, 0.0, False),
            [x, weight],
        )
    return Work(
        lambda: F.layer_norm(x, shape, weight, bias),
        (x, weight, bias),
        {},
        lambda: fusedops_cpu.norms.layer_norm.layer_norm.call(x, weight, bias, 1e-5, False),
        [x, weight, bias],
    )


def add_norm(n: int, dtype: torch.dtype, form: str) -> Work:
    """Return the same for add_rms_norm and add_layer_norm."""
    x, weight, residual = rows(n, dtype)
    shape, bias = x.shape[-1:], torch.randn_like(weight)

    def plain() -> tuple[Tensor, Tensor]:
        s = x + residual
        return (F.rms_norm(s, shape, weight, 1e-6) if form == "rms" else F.layer_norm(s, shape, weight, bias)), s

    if form == "rms":
        return Work(
            plain,
            (x, residual, weight),
            {},
            lambda: fusedops_cpu.norms.add_rms_norm.add_rms_norm.call(x, residual, weight, 1e-6, 0.0, False),
            [x, residual, weight],
        )
    return Work(
        plain,
        (x, residual, weight, bias),
        {},
        lambda: fusedops_cpu.norms.add_layer_norm.add_layer_norm.call(x, residual, weight, bias, 1e-5, False),
        [x, residual, weight, bias],
    )


def gated(n: int, dtype: torch.dtype, form: str) -> Work:
    """Return the same for swiglu and geglu, of two tensors, packed halves or interleaved pairs of n outputs."""
    function, layout = form.split()
    gate, _, up = rows(n, dtype)
    packed, interleaved = torch.cat((gate, up), -1), layout == "pairs"

    def plain() -> Tensor:
        g, u = gate, up
        if layout != "two":
            g, u = (packed[..., ::2], packed[..., 1::2]) if interleaved else packed.chunk(2, -1)
        return (F.silu(g) if function == "silu" else F.gelu(g, approximate=function)) * u

    first, second = (gate, up) if layout == "two" else (packed, None)
    leaves = [gate, up] if layout == "two" else [packed]
    if function == "silu":
        return Work(
            plain,
            (first, second),
            {"interleaved": interleaved},
            lambda: fusedops_cpu.gated.swiglu.swiglu.call(first, second, None, 1.0, 0.0, interleaved),
            leaves,
        )
    return Work(
        plain,
        (first, second),
        {"approximate": function, "interleaved": interleaved},
        lambda: fusedops_cpu.gated.geglu.geglu.call(first, second, function, interleaved),
        leaves,
    )


def rotary(n: int, dtype: torch.dtype, form: str) -> Work:
    """Return the same for rotary_embedding of n elements of q, and a fourth as many of k, beside the chain of models.

    ``form``: halves of (B, N, S, D) or of transposed views of (B, S, N, D), as projections give; or interleaved pairs.
    """
    width, heads = (16, 1) if n < 2**12 else (64, 8)
    positions = n // heads // width
    shapes = [(1, count, positions, width) for count in (heads, max(1, heads // 4))]
    if form == "transposed":
        q, k = (torch.randn(b, s, h, d).to(dtype).transpose(1, 2) for b, h, s, d in shapes)
    else:
        q, k = (torch.randn(shape).to(dtype) for shape in shapes)
    cos, sin = (torch.randn(1, positions, width // 2).to(dtype) for _ in range(2))
    interleaved = form == "pairs"
    double = [
        t[:, None].repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1)[:, None] for t in (cos, sin)
    ]

    def turned(x: Tensor) -> Tensor:
        if interleaved:
            return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)

    return Work(
        lambda: tuple(x * double[0] + turned(x) * double[1] for x in (q, k)),
        (q, k, cos, sin),
        {"interleaved": interleaved},
        lambda: fusedops_cpu.rotary.rotary_embedding.rotary_embedding.call(q, k, cos, sin, interleaved, -2),
        [q, k],
    )


def loss(n: int, dtype: torch.dtype, form: str) -> Work:
    """Return the same for cross_entropy of n logits, of 16 to 32000 classes."""
    classes = min(32000, max(16, 1 << (n.bit_length() // 2 + 2)))
    logits = torch.randn(max(1, n // classes), classes).to(dtype)
    target = torch.randint(classes, logits.shape[:1])
    smoothing = 0.1 if form == "smoothed" else 0.0
    return Work(
        lambda: F.cross_entropy(logits, target, label_smoothing=smoothing),
        (logits, target),
        {"label_smoothing": smoothing},
        lambda: losses.cross_entropy.call(logits, target, -100, smoothing, 0.0, None, "mean", None, False),
        [logits],
    )


#: The op, the maker of its work, and the form. The first form of an op is the one in the first table of
#: docs/performance.md: that of most models.
CASES: list[tuple[str, Callable[[int, torch.dtype, str], Work], str]] = [
    ("scaled_masked_softmax", softmax, "mask"),
    ("scaled_masked_softmax", softmax, "causal"),
    ("scaled_masked_softmax", softmax, "none"),
    ("bias_gelu", gelu, "tanh"),
    ("bias_gelu", gelu, "none"),
    ("bias_dropout", dropout, "training"),
    ("bias_dropout_add", dropout_add, "training"),
    ("bias_dropout_add", dropout_add, "evaluation"),
    ("rms_norm", norm, "rms"),
    ("add_rms_norm", add_norm, "rms"),
    ("layer_norm", norm, "layer"),
    ("add_layer_norm", add_norm, "layer"),
    ("swiglu", gated, "silu two"),
    ("swiglu", gated, "silu halves"),
    ("swiglu", gated, "silu pairs"),
    ("geglu", gated, "tanh two"),
    ("geglu", gated, "none two"),
    ("rotary_embedding", rotary, "halves"),
    ("rotary_embedding", rotary, "transposed"),
    ("rotary_embedding", rotary, "pairs"),
    ("cross_entropy", loss, "plain"),
    ("cross_entropy", loss, "smoothed"),
]


def limit(op: str, form: str, n: int, dtype: torch.dtype) -> dict[str, float]:
    """Return the fewest bytes that each direction of a call must move, in copies of a tensor of ``n`` elements.

    A copy reads and writes each byte of the tensor once. Nothing is allocated: the tensors are on the meta device.
    """
    make = next(make for name, make, each in CASES if (name, each) == (op, form))
    with torch.device("meta"):
        work = make(n, dtype, form)
    contract = fusedops.ops.OPS[op]
    fewest = contract.evidence.min_bytes(*contract.bound_specs(work.args, work.options))
    return {direction: count / (2 * n * dtype.itemsize) for direction, count in fewest.items()}
