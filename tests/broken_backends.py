"""Backends with one fault each: the conformance kit must find every one, by the check and in the words given here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from loopback import contiguous
from torch import Tensor

import fusedops
from fusedops import Backend, Deviation, Kernel, kernel
from fusedops._op import OPS
from fusedops.constraints import Constraint, Dim, DType
from fusedops.testing import _checks

SOFTMAX, GELU, DROPOUT = (OPS[name] for name in ("scaled_masked_softmax", "bias_gelu", "bias_dropout"))
ALL_OF_IT = frozenset(kind.name for kind in _checks._KINDS) - {"kernel"}


@dataclass(frozen=True)
class Broken:
    """A backend, the check that must fail for it, the words of that check's failures, and what may fail beside it."""

    name: str
    kernels: Callable[[], Sequence[Kernel]]
    check: str
    says: str
    also: frozenset[str] = frozenset()

    def backend(self) -> Backend:
        return Backend(self.name, ("cpu",), -50, tuple(self.kernels()))


def right(op: Any, *limits: Constraint, backward: bool = True) -> list[Kernel]:
    """The op's own reference as kernels."""
    made = [kernel(op.name, *limits)(contiguous(op.reference))]
    return [*made, kernel(op.name, direction="backward")(contiguous(op.backward))] if backward else made


def softmax(run: Callable[[Tensor, Tensor | None, float, bool], Tensor], *limits: Constraint) -> list[Kernel]:
    """A softmax whose forward is ``run``, and whose backward is right."""

    def forward(x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, causal: bool = False) -> Tensor:
        return run(x, mask, scale, causal)

    return [kernel(SOFTMAX.name, *limits)(forward), right(SOFTMAX)[1]]


def softmax_of(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    return SOFTMAX.reference(x, mask, scale, causal=causal).contiguous()


def gelu(run: Callable[[Tensor, Tensor | None, str], Tensor]) -> list[Kernel]:
    """A GELU whose forward is ``run``, and whose backward is right."""

    def forward(x: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
        return run(x, bias, approximate)

    return [kernel(GELU.name)(forward), right(GELU)[1]]


def gelu_backward(
    run: Callable[[Tensor, Tensor, Tensor | None, str, tuple[bool, ...]], Any], **of: Any
) -> list[Kernel]:
    """A GELU whose backward is ``run``, and whose forward is right."""

    def backward(grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]) -> Any:
        return run(grad, x, bias, approximate, needs)

    return [right(GELU)[0], kernel(GELU.name, direction="backward", **of)(backward)]


def uniform_dead_rows(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """As masked_fill(-10000) and softmax give it."""
    y = softmax_of(x, mask, scale, causal)
    return torch.where((y == 0).all(-1, keepdim=True), 1 / max(x.shape[-1], 1), y).to(x.dtype)


def written_input(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    y = GELU.reference(x, bias, approximate=approximate).contiguous()
    if x.is_contiguous():  # torch itself refuses to write into an expanded one
        x.zero_()
    return y


def up_to_79_columns(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    if x.shape[-1] >= 80:
        raise RuntimeError("the kernel has room for 79 columns")
    return softmax_of(x, mask, scale, causal)


def float32_dbias(grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]) -> Any:
    dx, dbias = contiguous(GELU.backward)(grad, x, bias, approximate, needs)
    return dx, None if dbias is None else dbias.float()


def next_seed() -> list[Kernel]:
    """A mask of its own: right by itself, forward and backward alike, but not the contract's bits."""

    def forward(
        x: Tensor, bias: Tensor | None = None, p: float = 0.5, *, training: bool = True, seed: Tensor | None = None
    ) -> Tensor:
        other = None if seed is None else seed + 1
        return DROPOUT.reference(x, bias, p, training=training, seed=other).contiguous()

    def backward(
        grad: Tensor,
        seed: Tensor | None,
        bias: Tensor | None,
        p: float,
        training: bool,
        x_dtype: torch.dtype,
        needs: tuple[bool, ...],
    ) -> Any:
        other = None if seed is None else seed + 1
        return contiguous(DROPOUT.backward)(grad, other, bias, p, training, x_dtype, needs)

    return [kernel(DROPOUT.name)(forward), kernel(DROPOUT.name, direction="backward")(backward)]


class Unenforced(Dim):
    """A limit that is declared, and tested by nobody."""

    def expression(self, constants: dict[str, object]) -> str:
        return "True"


def by_eager(x: Tensor, bias: Tensor | None, approximate: Any) -> Tensor:
    return fusedops.bias_gelu(x, bias, approximate=approximate, backend="eager")


def columns_first(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    return softmax_of(x, mask, scale, causal).mT.contiguous().mT


def shuffled_sum(grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]) -> Any:
    """The gradient of the bias summed in another order on each run, as atomic additions do."""
    dx, dbias = contiguous(GELU.backward)(grad, x, bias, approximate, needs)
    if bias is not None and bias.dim() == 1 and needs[1] and x.dtype == bias.dtype == torch.float32:
        du, _ = GELU.backward(grad, x, bias, approximate, (True, False))
        rows = du.flatten(0, -2)
        dbias = torch.zeros_like(bias)
        for row in rows[torch.randperm(rows.shape[0])]:
            dbias += row
    return dx, dbias


EVERY_DTYPE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BROKEN = [
    Broken(
        "dead_row",
        lambda: softmax(uniform_dead_rows),
        "scaled_masked_softmax/forward/masked_rows",
        r"a fully masked row has 0\.0\d+; needs exactly 0",
        frozenset({"float64", "strides"}),
    ),
    Broken(
        "mutated_input",
        lambda: gelu(written_input),
        "bias_gelu/forward/inputs",
        "x was written; needs every input as it was, bit for bit",
        ALL_OF_IT,
    ),
    Broken(
        "off_by_one",
        lambda: softmax(up_to_79_columns, Dim("x", (-1,), at_most=80)),
        "scaled_masked_softmax/forward/limits",
        "raised RuntimeError: the kernel has room for 79 columns",
    ),
    Broken(
        "dbias_dtype",
        lambda: gelu_backward(float32_dbias),
        "bias_gelu/backward/dtypes",
        r"the gradient of bias is float32 \(\d+,\) on cpu, contiguous; needs bfloat16",
        frozenset({"float64", "inputs", "fake", "autograd"}),  # in float64 it is rounded too
    ),
    Broken(
        "dropout_bits",
        next_seed,
        "bias_dropout/forward/dropout",
        r"\d+ of \d+ elements are kept, or dropped, that should not be",
        ALL_OF_IT - {"inputs", "fake", "determinism", "opcheck"},
    ),
    Broken(
        "unenforced",
        lambda: right(SOFTMAX, Unenforced("x", (-1,), at_most=80)),
        "scaled_masked_softmax/forward/limits",
        "is taken, though the limit says 'x: dim -1 a size of at most 80': it is not enforced",
    ),
    Broken(
        "no_limit_at_all",
        lambda: right(SOFTMAX, DType("x", *EVERY_DTYPE)),
        "scaled_masked_softmax/forward/limits",
        "the limit 'x: float16, bfloat16, float32 or float64' refuses nothing",
    ),
    Broken(
        "extra_fallback",
        lambda: gelu(by_eager),
        "bias_gelu/forward/float64",
        r"eager's bias_gelu forward and extra_fallback's bias_gelu forward ran; needs extra_fallback's bias_gelu "
        r"forward and nothing else",
        ALL_OF_IT,
    ),
    Broken(
        "no_backward",
        lambda: right(GELU, backward=False),
        "bias_gelu/backward/kernel",
        "has no backward kernel: another backend serves the gradient",
    ),
    Broken(
        "fake_shape",
        lambda: softmax(columns_first),
        "scaled_masked_softmax/forward/fake",
        r"the output is \w+ \([\d, ]+\) with strides \([\d, ]+\); the fake tensor, by which code is compiled, says",
        ALL_OF_IT,
    ),
    Broken(
        "nondeterministic",
        lambda: gelu_backward(shuffled_sum),
        "bias_gelu/backward/determinism",
        "two runs differ in [0-9]+ of 33 elements of the gradients of x and bias",
    ),
]

DECLARED = Broken(
    "declared",
    lambda: gelu_backward(shuffled_sum, deviations=(Deviation("nondeterministic", "sums by atomic additions"),)),
    "",
    "",
)


def wrong_signature() -> Backend:
    """Refused before any check: the kernel's parameters are not the op's."""

    def bias_gelu(x: Tensor, bias: Tensor | None = None, *, form: str = "tanh") -> Tensor:
        return GELU.reference(x, bias, approximate=form)

    return Backend("signature", ("cpu",), -50, (kernel(GELU.name)(bias_gelu),))
