"""linear_log_probs in plain torch, without constraints. The computation is in ``_linear_log_probs.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.ops.losses.arguments import check_targets
from fusedops.ops.losses.formulas import Wanted
from fusedops_eager._linear_log_probs import Options, gradients, statistics
from fusedops_eager._row_order import PRODUCTS


@kernel(ops.linear_log_probs, source="torch.mm, fusedops_eager/_linear_log_probs.py", rows_independent=PRODUCTS)
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
    check_targets("linear_log_probs", target, ignore_index, weight.shape[0])
    options = Options(temperature, softcap, ignore_index, return_entropy)
    flat = target.reshape(-1)
    logp, entropy, lse = statistics(x.reshape(flat.numel(), x.shape[-1]), weight, flat, bias, options)
    shape = target.shape
    return logp.view(shape), entropy.view(shape), lse.view(shape) if save else None


@kernel(
    ops.linear_log_probs,
    direction="backward",
    source="fusedops_eager/_linear_log_probs.py",
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
    options = Options(temperature, softcap, ignore_index, return_entropy)
    flat, wanted = target.reshape(-1), Wanted(needs[0], needs[1], needs[2] and bias is not None)
    of_logp, of_entropy = grad_logp.reshape(-1), grad_entropy.reshape(-1)
    x_rows, sums = x.reshape(flat.numel(), x.shape[-1]), (entropy.reshape(-1), lse.reshape(-1))
    dx, dweight, dbias = gradients(of_logp, of_entropy, x_rows, weight, flat, bias, *sums, options, wanted)
    return (
        None if dx is None else dx.view(x.shape),
        None if dweight is None else dweight.to(weight.dtype),
        None if dbias is None or bias is None else dbias.to(bias.dtype),
    )
