"""Backends with one fault each: the conformance kit must report each, by the check and the text listed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from loopback import contiguous, reference_kernels
from torch import Tensor

import fusedops
from fusedops import Backend, Deviation, Kernel, kernel
from fusedops.constraints import Constraint, Dim, DType
from fusedops.testing import OPS
from fusedops.testing._kinds import KINDS

SOFTMAX, GELU, DROPOUT = (OPS[name] for name in ("scaled_masked_softmax", "bias_gelu", "bias_dropout"))
_ORDER = torch.Generator()
EVERY_CHECK = frozenset(kind.name for kind in KINDS) - {"kernel"}


@dataclass(frozen=True)
class Broken:
    """A backend with one fault.

    Attributes:
        name: its name.
        kernels: makes its kernels.
        check: the check that must fail.
        pattern: matches the text of each failure of that check.
        also: the kinds of checks that may fail too.
    """

    name: str
    kernels: Callable[[], Sequence[Kernel]]
    check: str
    pattern: str
    also: frozenset[str] = frozenset()

    def backend(self) -> Backend:
        return Backend(self.name, ("cpu",), -50, tuple(self.kernels()))


def softmax(run: Callable[[Tensor, Tensor | None, float, bool], Tensor], *constraints: Constraint) -> list[Kernel]:
    """Return a softmax whose forward is ``run``, and whose backward is right."""

    def forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
        return run(x, mask, scale, causal)

    return [kernel(SOFTMAX.name, *constraints)(forward), reference_kernels(SOFTMAX)[1]]


def softmax_of(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    return SOFTMAX.reference(x, mask, scale, causal).contiguous()


def gelu(run: Callable[[Tensor, Tensor | None, str], Tensor]) -> list[Kernel]:
    """Return a GELU whose forward is ``run``, and whose backward is right."""

    def forward(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
        return run(x, bias, approximate)

    return [kernel(GELU.name)(forward), reference_kernels(GELU)[1]]


def gelu_backward(
    run: Callable[[Tensor, Tensor, Tensor | None, str, tuple[bool, ...]], Any], **fields: Any
) -> list[Kernel]:
    """Return a GELU whose backward is ``run``, and whose forward is right."""

    def backward(grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]) -> Any:
        return run(grad, x, bias, approximate, needs)

    return [reference_kernels(GELU)[0], kernel(GELU.name, direction="backward", **fields)(backward)]


def uniform_dead_rows(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Return fully masked rows as masked_fill(-10000) and softmax give them."""
    y = softmax_of(x, mask, scale, causal)
    return torch.where((y == 0).all(-1, keepdim=True), 1 / max(x.shape[-1], 1), y).to(x.dtype)


def written_input(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    y = GELU.reference(x, bias, approximate).contiguous()
    if x.is_contiguous():  # torch itself refuses to write into an expanded one
        x.zero_()
    return y


def up_to_79_columns(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    if x.shape[-1] >= 80:
        raise RuntimeError("the kernel has room for 79 columns")
    return softmax_of(x, mask, scale, causal)


def float32_dbias(grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]) -> Any:
    dx, dbias = contiguous(GELU.backward, *GELU.backward_parameters)(grad, x, bias, approximate, needs)
    return dx, None if dbias is None else dbias.float()


def next_seed() -> list[Kernel]:
    """Return dropout with another keep-mask: the same forward and backward, but not the contract's bits."""

    def forward(x: Tensor, bias: Tensor | None, p: float, training: bool, seed: Tensor | None) -> Tensor:
        return DROPOUT.reference(x, bias, p, training, None if seed is None else seed + 1).contiguous()

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
        return contiguous(DROPOUT.backward, *DROPOUT.backward_parameters)(
            grad, other, bias, p, training, x_dtype, needs
        )

    return [kernel(DROPOUT.name)(forward), kernel(DROPOUT.name, direction="backward")(backward)]


class Unenforced(Dim):
    """A constraint that is declared, and whose check is always met."""

    def expression(self, constants: dict[str, object]) -> str:
        return "True"


def by_eager(x: Tensor, bias: Tensor | None, approximate: Any) -> Tensor:
    return fusedops.bias_gelu(x, bias, approximate=approximate, backend="eager")


def columns_first(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    return softmax_of(x, mask, scale, causal).mT.contiguous().mT


def shuffled_sum(grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]) -> Any:
    """Sum the gradient of the bias in another order on each run, as atomic additions do."""
    dx, dbias = contiguous(GELU.backward, *GELU.backward_parameters)(grad, x, bias, approximate, needs)
    if bias is not None and bias.dim() == 1 and needs[1] and x.dtype == bias.dtype == torch.float32:
        du, _ = GELU.backward(grad, x, bias, approximate, (True, False))
        rows = du.flatten(0, -2)
        dbias = torch.zeros_like(bias)
        for row in rows[torch.randperm(rows.shape[0], generator=_ORDER)]:
            dbias += row
    return dx, dbias


EVERY_DTYPE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BROKEN = [
    Broken(
        "dead_row",
        lambda: softmax(uniform_dead_rows),
        "scaled_masked_softmax/forward/masked_rows",
        r"got 0\.0\d+ in a fully masked row, expected exactly 0",
        frozenset({"float64", "strides"}),
    ),
    Broken(
        "mutated_input",
        lambda: gelu(written_input),
        "bias_gelu/forward/inputs",
        "got (x written by the call, expected every input unchanged|a write into the memory of an input)",
        EVERY_CHECK,
    ),
    Broken(
        "off_by_one",
        lambda: softmax(up_to_79_columns, Dim("x", (-1,), at_most=80)),
        "scaled_masked_softmax/forward/constraints",
        "raised RuntimeError: the kernel has room for 79 columns",
    ),
    Broken(
        "dbias_dtype",
        lambda: gelu_backward(float32_dbias),
        "bias_gelu/backward/dtypes",
        r"got the gradient of bias as float32 \(\d+,\) on cpu, contiguous; expected bfloat16",
        frozenset({"float64", "inputs", "fake", "autograd"}),  # in float64 it is rounded too
    ),
    Broken(
        "dropout_bits",
        next_seed,
        "bias_dropout/forward/dropout",
        r"got \d+ of \d+ elements kept or dropped, expected those of fusedops.testing.keep_mask",
        EVERY_CHECK - {"inputs", "fake", "determinism", "opcheck"},
    ),
    Broken(
        "unenforced",
        lambda: reference_kernels(SOFTMAX, Unenforced("x", (-1,), at_most=80)),
        "scaled_masked_softmax/forward/constraints",
        "got a call taken that is outside the constraint 'x: dim -1 a size of at most 80', expected a refusal",
    ),
    Broken(
        "refuses_nothing",
        lambda: reference_kernels(SOFTMAX, DType("x", *EVERY_DTYPE)),
        "scaled_masked_softmax/forward/constraints",
        "got no refusal by the constraint 'x: float16, bfloat16, float32 or float64', expected one",
    ),
    Broken(
        "extra_fallback",
        lambda: gelu(by_eager),
        "bias_gelu/forward/float64",
        "got runs of eager's bias_gelu forward and extra_fallback's bias_gelu forward, expected extra_fallback's "
        "bias_gelu forward and no other kernel",
        EVERY_CHECK,
    ),
    Broken(
        "no_backward",
        lambda: reference_kernels(GELU, backward=False),
        "bias_gelu/backward/kernel",
        "got no backward kernel, expected one: another backend serves the gradient",
    ),
    Broken(
        "fake_shape",
        lambda: softmax(columns_first),
        "scaled_masked_softmax/forward/fake",
        r"got the output as \w+ \([\d, ]+\) with strides \([\d, ]+\), expected .*, the fake tensor's, by which code is",
        EVERY_CHECK,
    ),
    Broken(
        "nondeterministic",
        lambda: gelu_backward(shuffled_sum),
        "bias_gelu/backward/determinism",
        "got two runs that differ in [0-9]+ of 33 elements of the gradients of x and bias, expected the same bits",
        frozenset({"state"}),
    ),
]

DECLARED = Broken(
    "declared",
    lambda: gelu_backward(shuffled_sum, deviations=(Deviation("nondeterministic", "sums by atomic additions"),)),
    "",
    "",
)


def wrong_signature() -> Backend:
    """Return a backend that is refused before any check: the kernel's parameters are not the op's."""

    def bias_gelu(x: Tensor, bias: Tensor | None, form: str) -> Tensor:
        return GELU.reference(x, bias, form)

    return Backend("signature", ("cpu",), -50, (kernel(GELU.name)(bias_gelu),))
