"""linear_log_probs on Triton: the kernels with their constraints. ``_linear_log_probs.py`` launches."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops_triton._constraints import PRODUCTS, row_length, supported

_SOURCE = "torch.mm, fusedops_triton/_linear_log_probs.py"
_CLASSES = row_length("weight", 0)


@kernel(ops.linear_log_probs, *supported("x", "weight"), _CLASSES, source=_SOURCE, rows_independent=PRODUCTS)
def linear_log_probs(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    ignore_index: int,
    return_entropy: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the log probabilities and the entropy in chunks of rows."""
    from fusedops_triton._linear_log_probs import Options, row_statistics  # imports triton, so not at module level

    flat, options = target.reshape(-1), Options(temperature, softcap, ignore_index, return_entropy)
    logp, entropy, lse = row_statistics(x.reshape(flat.numel(), x.shape[-1]), weight, flat, bias, options)
    shape = target.shape
    return logp.view(shape), entropy.view(shape), lse.view(shape) if save else None


@kernel(
    ops.linear_log_probs,
    *supported("x", "weight"),
    _CLASSES,
    direction="backward",
    source=_SOURCE,
    rows_independent=PRODUCTS,
)
def linear_log_probs_backward(
    grad_logp: Tensor,
    grad_entropy: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    entropy: Tensor,
    lse: Tensor,
    temperature: float,
    softcap: float | None,
    ignore_index: int,
    return_entropy: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the chunks again, and the gradients of x, weight and bias."""
    from fusedops_triton._linear_log_probs import Options, row_gradients

    flat, options = target.reshape(-1), Options(temperature, softcap, ignore_index, return_entropy)
    rows = [each.reshape(-1).resolve_neg().contiguous() for each in (grad_logp, grad_entropy, entropy, lse)]
    wanted = (needs[0], needs[1], needs[2] and bias is not None)
    given = (x.reshape(flat.numel(), x.shape[-1]), weight, flat, bias)
    dx, dweight, dbias = row_gradients(rows[0], rows[1], rows[2], rows[3], *given, options=options, wanted=wanted)
    return (
        None if dx is None else dx.view(x.shape),
        None if dweight is None else dweight.to(weight.dtype),
        None if dbias is None or bias is None else dbias.to(bias.dtype),
    )
