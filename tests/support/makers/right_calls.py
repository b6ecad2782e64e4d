"""Random calls of the ops by right kernels, under verify: layouts, dtypes, extremes, masked rows, scales.

Run many by hand, with the sources and the folders of ``tests/support`` on the path:
``python tests/support/makers/right_calls.py 20000``.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch
from torch import Tensor

import fusedops
from fusedops import MismatchError

SIZES = (0, 1, 2, 3, 5, 8, 16, 33, 64)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SCALES = (1.0, 0.125, -0.5, 30.0, 1e6, 1e-3, 0.0, 1e30)
PROBABILITIES = (0.0, 0.1, 0.5, 0.9, 1.0, 1e-9, 1 - 1e-9)
FACTORS = (1.0, 1.0, 1.0, 1e-3, 30.0, 1e3, 1e-6)


class RightCall:
    """One random call, the same for a seed: its tensors, its backend, and its run under verify."""

    def __init__(self, seed: int, backends: tuple[str, ...]) -> None:
        self.seed = seed
        self.pick = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.backend = self.pick.choice(backends)
        self.op = self.pick.choice(("scaled_masked_softmax", "bias_gelu", "bias_dropout", "bias_dropout_add"))
        if self.backend == "npu":
            self.op = self.pick.choice(("scaled_masked_softmax", "bias_gelu"))
        self.dtype = self.pick.choice(DTYPES[:3] if self.backend in ("cpu", "npu") else DTYPES)
        self.vendor = self.backend == "npu"  # the stand-in's numbers at inf are those of torch's own functions

    def run(self) -> list[str]:
        """Serve the call, forward and backward, compare, and return the backends that served it."""
        against = "reference" if self.backend == "eager" or self.pick.random() < 0.7 else "eager"
        call = getattr(self, f"_{self.op}")()
        with fusedops.use(self.backend, fallback="silent"), fusedops.verify(against) as report:
            y = call()
            grad = self._gradient(y)
            if y.requires_grad:
                y.backward(grad)
        return sorted({row.backend for row in report.rows})

    # ------------------------------------------------------------------------------------------------ the four ops

    def _scaled_masked_softmax(self) -> Callable[[], Tensor]:
        shape = self._shape(at_least=2)
        if self.vendor:  # the sizes that it supports
            shape = (self.pick.choice((1, 2)), 1, 32, self.pick.choice((32, 64)))
        x = self._tensor(shape, self.dtype, special=not self.vendor)
        scale = self.pick.choice(SCALES[:3] if self.vendor else SCALES)
        mask = None
        if self.pick.random() < 0.7:
            kept = [size if self.pick.random() < 0.7 else 1 for size in shape]
            mask = torch.rand(kept, generator=self.torch) < self.pick.choice((0.1, 0.35, 0.9))
            if mask.numel() and self.pick.random() < 0.4:
                mask[..., :: self.pick.choice((1, 2, 3)), :] = True  # whole rows
            mask = mask.to(x.device)
            mask = mask.to(torch.uint8) if self.pick.random() < 0.3 else mask
        causal = self.pick.random() < 0.3
        return lambda: fusedops.scaled_masked_softmax(x, mask, scale, causal=causal)

    def _bias_gelu(self) -> Callable[[], Tensor]:
        x = self._tensor(self._shape(), self.dtype, special=not self.vendor)
        bias, form = self._bias(x), self.pick.choice(("tanh", "none"))
        return lambda: fusedops.bias_gelu(x, bias, approximate=form)

    def _bias_dropout(self) -> Callable[[], Tensor]:
        x = self._tensor(self._shape(), self.dtype)
        bias, p, training = self._bias(x), self.pick.choice(PROBABILITIES), self.pick.random() < 0.85
        return lambda: fusedops.bias_dropout(x, bias, p, training=training, seed=self.seed)

    def _bias_dropout_add(self) -> Callable[[], Tensor]:
        x = self._tensor(self._shape(), self.dtype)
        bias, p, training = self._bias(x), self.pick.choice(PROBABILITIES), self.pick.random() < 0.85
        residual = self._tensor(tuple(x.shape), self._other_dtype())
        return lambda: fusedops.bias_dropout_add(x, bias, residual, p, training=training, seed=self.seed)

    # --------------------------------------------------------------------------------------------------- arguments

    def _shape(self, at_least: int = 1) -> tuple[int, ...]:
        rank = self.pick.randint(at_least, 4)
        if self.pick.random() < 0.02 and self.backend in ("eager", "cpu"):
            return (*(1,) * (rank - 2), 515, 517)[-max(rank, 2) :]
        sizes = SIZES[:7] if self.backend == "triton" else SIZES
        return tuple(self.pick.choice(sizes) if self.pick.random() < 0.8 else 4 for _ in range(rank))

    def _other_dtype(self) -> torch.dtype:
        if self.backend == "triton" and self.op == "bias_dropout_add":
            return self.dtype  # the interpreter cuts float32 off to bfloat16, where hardware rounds
        choices = DTYPES[:3] if self.vendor else DTYPES
        return self.pick.choice(choices) if self.pick.random() < 0.3 else self.dtype

    def _bias(self, x: Tensor) -> Tensor | None:
        if self.pick.random() < 0.2:
            return None
        shape = tuple(x.shape[self.pick.choice((-1, -1, 0)) :])
        if self.pick.random() < 0.3:
            shape = tuple(size if self.pick.random() < 0.5 else 1 for size in shape)
        return self._tensor(shape, self._other_dtype(), special=not self.vendor)

    def _tensor(self, shape: tuple[int, ...], dtype: torch.dtype, special: bool = True) -> Tensor:
        values = torch.randn(shape, generator=self.torch, dtype=torch.float64) * self.pick.choice(FACTORS)
        if self.pick.random() < 0.1:
            values = values.round()  # ties
        values = values.clamp(-1000, 1000) if not special else values
        tensor = values.to(dtype)
        if special and tensor.numel() and self.pick.random() < 0.4:
            finfo = torch.finfo(dtype)
            extremes = (finfo.min, finfo.max, float("inf"), -float("inf"), float("nan"), -0.0, finfo.tiny, 1e4, -1e4)
            for _ in range(self.pick.randint(1, 3)):
                tensor.view(-1)[self.pick.randrange(tensor.numel())] = self.pick.choice(extremes)
        tensor = self._layout(tensor)
        if self.vendor:
            tensor = tensor.to("npu")
        return tensor.requires_grad_(self.pick.random() < 0.8)

    def _layout(self, tensor: Tensor) -> Tensor:
        kind = self.pick.choice(("contiguous", "contiguous", "transposed", "cut", "expanded"))
        if tensor.dim() < 2 or kind == "contiguous":
            return tensor
        if kind == "transposed":
            return tensor.mT.contiguous().mT
        if kind == "cut":
            wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
            wide[..., ::2] = tensor
            return wide[..., ::2]
        return tensor[..., :1, :].expand(tensor.shape)

    def _gradient(self, y: Tensor) -> Tensor:
        factor = self.pick.choice((1.0, 1.0, 2.0**14, 1e-6))
        grad = (torch.randn(y.shape, generator=self.torch, dtype=torch.float64) * factor).to(y.dtype)
        kind = self.pick.random()
        if kind < 0.1:
            grad = torch.ones((), dtype=y.dtype).expand(y.shape)
        elif kind < 0.2:
            grad = self._layout(grad)
        elif kind < 0.3 and grad.numel() and not self.vendor:
            grad.view(-1)[self.pick.randrange(grad.numel())] = self.pick.choice((float("inf"), float("nan"), 1e4))
        return grad.to(y.device)


def false_alarms(seeds: Iterator[int] | range, backends: tuple[str, ...]) -> tuple[list[str], Counter[str]]:
    """Run one call for each seed, and return the mismatches as texts, and how many calls each backend served."""
    alarms: list[str] = []
    served: Counter[str] = Counter()
    for seed in seeds:
        call = RightCall(seed, backends)
        try:
            served.update(call.run())
        except MismatchError as error:
            alarms.append(f"seed {seed}: {error}")
    return alarms, served


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    from ascend import ascend
    from standin import npu_device

    npu_device.register()
    with ExitStack() as stack:
        stack.enter_context(ascend())
        alarms, served = false_alarms(range(first, first + count), ("eager", "cpu", "triton", "npu"))
    print(f"{count} calls, {len(alarms)} false alarms; served by {dict(served)}")
    print("\n".join(alarms))
