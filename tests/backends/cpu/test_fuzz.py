"""Random calls of every op beside the eager backend: shapes, strides, dtypes, masks, special values."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

import fusedops

pytestmark = pytest.mark.usefixtures("on_cpu")

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def tensor(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(2**31))) * rng.choice([0.1, 1, 4])
    if rng.random() < 0.2 and values.numel():
        values.view(-1)[rng.randrange(values.numel())] = rng.choice([math.nan, math.inf, -math.inf, -0.0, 1e-40])
    values = values.to(dtype)
    if len(shape) > 1 and rng.random() < 0.3:
        values = values.mT.contiguous().mT
    return values.requires_grad_()


def shape_of(rng: random.Random) -> tuple[int, ...]:
    return (
        *tuple(rng.choice([1, 2, 3, 7]) for _ in range(rng.randrange(3))),
        rng.randrange(1, 40),
        rng.randrange(1, 300),
    )


def compare(rng: random.Random, call: object, inputs: list[Tensor]) -> None:
    results: list[list[Tensor]] = []
    seed = rng.randrange(2**31)
    for backend in ("cpu", "eager"):
        outputs = call(backend)  # type: ignore[operator]
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        generator = torch.Generator().manual_seed(seed)
        grads = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs]
        results.append([*(y.detach() for y in outputs), *torch.autograd.grad(outputs, inputs, grads)])
    for position, (ours, theirs) in enumerate(zip(*results, strict=True)):
        tolerance = TOLERANCE[ours.dtype]
        rows = max(1, results[0][0].numel() // max(1, ours.numel()))
        torch.testing.assert_close(
            ours,
            theirs,
            rtol=tolerance,
            atol=tolerance * 4 * math.sqrt(rows),
            equal_nan=True,
            msg=lambda m, p=position: f"{p}: {m}",
        )


@pytest.mark.parametrize("number", range(60))
def test_softmax(number: int) -> None:
    rng = random.Random(number)
    shape, dtype = shape_of(rng), rng.choice([*TOLERANCE])
    x = tensor(rng, shape, dtype)
    mask = None
    if rng.random() < 0.7:
        mask_shape = tuple(size if rng.random() < 0.6 else 1 for size in shape)[rng.randrange(len(shape)) :]
        mask = torch.rand(mask_shape, generator=torch.Generator().manual_seed(number)) < rng.choice([0.1, 0.5, 0.95])
        mask = mask if rng.random() < 0.5 else mask.to(torch.uint8) * 7
    scale, causal = rng.choice([1.0, 0.125, -0.3, 3]), rng.random() < 0.5
    compare(rng, lambda b: fusedops.scaled_masked_softmax(x, mask, scale, causal=causal, backend=b), [x])


@pytest.mark.parametrize("number", range(60))
def test_rows(number: int) -> None:
    rng = random.Random(number)
    shape, dtype = shape_of(rng), rng.choice([*TOLERANCE])
    x, residual = tensor(rng, shape, dtype), tensor(rng, shape, dtype)
    bias = tensor(rng, rng.choice([shape[-1:], (1,), ()]), dtype) if rng.random() < 0.7 else None
    inputs = [x] if bias is None else [x, bias]
    p, seed = rng.choice([0.0, 0.1, 0.5, 1.0]), rng.randrange(2**63)
    compare(rng, lambda b: fusedops.bias_dropout(x, bias, p, seed=seed, backend=b), inputs)
    compare(rng, lambda b: fusedops.bias_dropout_add(x, bias, residual, p, seed=seed, backend=b), [*inputs, residual])
    finite = [t.detach().nan_to_num(1.0, 1.0, -1.0).requires_grad_() for t in inputs]
    form = rng.choice(["tanh", "none"])
    compare(rng, lambda b: fusedops.bias_gelu(*finite, approximate=form, backend=b), finite)


@pytest.mark.parametrize("number", range(60))
def test_norms(number: int) -> None:
    rng = random.Random(number)
    shape, dtype = shape_of(rng), rng.choice([*TOLERANCE])
    x, residual = tensor(rng, shape, dtype), tensor(rng, shape, dtype)
    weight, bias = (tensor(rng, shape[-1:], rng.choice([*TOLERANCE])) if rng.random() < 0.7 else None for _ in range(2))
    with torch.no_grad():  # what inf - inf and inf * 0 give depends on the order of the sums
        for each in (x, weight, bias):
            if each is not None:
                each.nan_to_num_(math.nan, math.nan, math.nan)
    eps, offset = rng.choice([1e-2, 1.0]), rng.choice([0.0, 1.0])
    vectors = [t for t in (weight, bias) if t is not None]
    only_weight = [t for t in (weight,) if t is not None]
    compare(rng, lambda b: fusedops.rms_norm(x, weight, eps, offset=offset, backend=b), [x, *only_weight])
    compare(rng, lambda b: fusedops.layer_norm(x, weight, bias, eps, backend=b), [x, *vectors])
    finite = residual.detach().nan_to_num(1.0, 1.0, -1.0).requires_grad_()
    pair = [x, finite]
    compare(
        rng, lambda b: fusedops.add_rms_norm(x, finite, weight, eps, offset=offset, backend=b), [*pair, *only_weight]
    )
    compare(rng, lambda b: fusedops.add_layer_norm(x, finite, weight, bias, eps, backend=b), [*pair, *vectors])


@pytest.mark.parametrize("number", range(60))
def test_gates(number: int) -> None:
    rng = random.Random(number)
    shape, dtype = shape_of(rng), rng.choice([*TOLERANCE])
    packed = tensor(rng, (*shape[:-1], 2 * shape[-1]), dtype)
    with torch.no_grad():  # at an infinite gate, inf * 0 is NaN or 0 by the form of the function
        packed.nan_to_num_(math.nan, 3.0, -3.0)
    two = rng.random() < 0.5
    first, second = packed.chunk(2, -1) if two else (packed, None)
    interleaved, form = not two and rng.random() < 0.5, rng.choice(["tanh", "none"])
    numbers = {
        "limit": rng.choice([None, 0.5, 7.0]),
        "alpha": rng.choice([1.0, 1.702]),
        "offset": rng.choice([0.0, 1.0]),
    }
    compare(rng, lambda b: fusedops.swiglu(first, second, interleaved=interleaved, backend=b, **numbers), [packed])
    compare(
        rng, lambda b: fusedops.geglu(first, second, approximate=form, interleaved=interleaved, backend=b), [packed]
    )


@pytest.mark.parametrize("number", range(60))
def test_losses(number: int) -> None:
    rng = random.Random(number)
    shape, dtype = shape_of(rng), rng.choice([*TOLERANCE])
    logits = tensor(rng, shape, dtype)
    target = torch.randint(shape[-1], shape[:-1], generator=torch.Generator().manual_seed(number))
    target[torch.rand(shape[:-1], generator=torch.Generator().manual_seed(number)) < 0.2] = -100
    options = {
        "label_smoothing": rng.choice([0.0, 0.0, 0.1, 1.0]),
        "z_loss": rng.choice([0.0, 0.0, 1e-2, 1.0]),
        "softcap": rng.choice([None, None, 0.5, 30.0]),
        "reduction": rng.choice(["mean", "sum", "none"]),
    }
    compare(rng, lambda b: fusedops.cross_entropy(logits, target, backend=b, **options), [logits])


@pytest.mark.parametrize("number", range(60))
def test_rotations(number: int) -> None:
    rng = random.Random(number)
    lead, positions, width = rng.choice([(), (1,), (3,), (2, 2)]), rng.randrange(1, 40), rng.randrange(1, 150)
    pairs, seq_dim = rng.randrange(width // 2 + 1), rng.choice([-2, -3])
    inputs: list[Tensor] = []
    for heads in (rng.randrange(1, 5), rng.randrange(1, 3)):
        x = tensor(rng, (*lead, heads, positions, width), rng.choice([*TOLERANCE]))
        with torch.no_grad():  # inf - inf and inf * 0 are NaN by the order of the products
            x.nan_to_num_(1.0, 1.0, -1.0)
        inputs.append(x)
    q, k = (x if seq_dim == -2 else x.transpose(-2, -3) for x in inputs)
    of_batch = rng.choice([(), lead, (1,) * len(lead)])
    cos, sin = (
        tensor(rng, (*of_batch, positions, pairs), rng.choice([*TOLERANCE])).detach().nan_to_num(0.5, 0.5, 0.5)
        for _ in range(2)
    )
    options = {"interleaved": rng.random() < 0.5, "seq_dim": seq_dim}
    compare(rng, lambda b: fusedops.rotary_embedding(q, k, cos, sin, backend=b, **options), inputs)
