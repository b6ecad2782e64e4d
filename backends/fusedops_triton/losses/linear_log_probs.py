"""linear_log_probs on Triton: the kernels with their constraints. ``_linear_log_probs.py`` launches."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.ops.losses.arguments import LinearLogProbsArgs, LinearLogProbsGradArgs
from fusedops_triton._constraints import PRODUCTS, row_length, supported

_SOURCE = "torch.mm, fusedops_triton/losses/_linear_log_probs.py"
_CLASSES = row_length("weight", 0)


@kernel(ops.linear_log_probs, *supported("x", "weight"), _CLASSES, source=_SOURCE, rows_independent=PRODUCTS)
def linear_log_probs(a: LinearLogProbsArgs, save: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the log probabilities and the entropy in chunks of rows."""
    from fusedops_triton.losses._linear_log_probs import (  # imports triton, so not at module level
        Options,
        row_statistics,
    )

    flat, options = a.target.reshape(-1), Options(a.temperature, a.softcap, a.ignore_index, a.return_entropy)
    logp, entropy, lse = row_statistics(a.x.reshape(flat.numel(), a.x.shape[-1]), a.weight, flat, a.bias, options)
    shape = a.target.shape
    return logp.view(shape), entropy.view(shape), lse.view(shape) if save else None


@kernel(
    ops.linear_log_probs,
    *supported("x", "weight"),
    _CLASSES,
    direction="backward",
    source=_SOURCE,
    rows_independent=PRODUCTS,
)
def linear_log_probs_backward(a: LinearLogProbsGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the chunks again, and the gradients of x, weight and bias."""
    from fusedops_triton.losses._linear_log_probs import Options, row_gradients

    flat, options = a.target.reshape(-1), Options(a.temperature, a.softcap, a.ignore_index, a.return_entropy)
    rows = [each.reshape(-1).resolve_neg().contiguous() for each in (a.grad_logp, a.grad_entropy, a.entropy, a.lse)]
    wanted = (a.needs[0], a.needs[1], a.needs[2] and a.bias is not None)
    given = (a.x.reshape(flat.numel(), a.x.shape[-1]), a.weight, flat, a.bias)
    dx, dweight, dbias = row_gradients(rows[0], rows[1], rows[2], rows[3], *given, options=options, wanted=wanted)
    return (
        None if dx is None else dx.view(a.x.shape),
        None if dweight is None else dweight.to(a.weight.dtype),
        None if dbias is None or a.bias is None else dbias.to(a.bias.dtype),
    )
