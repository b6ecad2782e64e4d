"""linear_log_probs in plain torch, without constraints. The computation is in ``_linear_log_probs.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.ops.losses.arguments import LinearLogProbsArgs, LinearLogProbsGradArgs, check_targets
from fusedops.ops.losses.formulas import Wanted
from fusedops_eager._row_order import PRODUCTS
from fusedops_eager.losses._linear_log_probs import Options, gradients, statistics


@kernel(ops.linear_log_probs, source="torch.mm, fusedops_eager/losses/_linear_log_probs.py", rows_independent=PRODUCTS)
def linear_log_probs(a: LinearLogProbsArgs, save: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the log probabilities and the entropy in chunks of rows."""
    check_targets("linear_log_probs", a.target, a.ignore_index, a.weight.shape[0])
    options = Options(a.temperature, a.softcap, a.ignore_index, a.return_entropy)
    flat = a.target.reshape(-1)
    logp, entropy, lse = statistics(a.x.reshape(flat.numel(), a.x.shape[-1]), a.weight, flat, a.bias, options)
    shape = a.target.shape
    return logp.view(shape), entropy.view(shape), lse.view(shape) if save else None


@kernel(
    ops.linear_log_probs,
    direction="backward",
    source="fusedops_eager/losses/_linear_log_probs.py",
    rows_independent=PRODUCTS,
)
def linear_log_probs_backward(a: LinearLogProbsGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the chunks again, and the gradients of x, weight and bias."""
    options = Options(a.temperature, a.softcap, a.ignore_index, a.return_entropy)
    flat, wanted = a.target.reshape(-1), Wanted(a.needs[0], a.needs[1], a.needs[2] and a.bias is not None)
    of_logp, of_entropy = a.grad_logp.reshape(-1), a.grad_entropy.reshape(-1)
    x_rows, sums = a.x.reshape(flat.numel(), a.x.shape[-1]), (a.entropy.reshape(-1), a.lse.reshape(-1))
    dx, dweight, dbias = gradients(of_logp, of_entropy, x_rows, a.weight, flat, a.bias, *sums, options, wanted)
    return (
        None if dx is None else dx.view(a.x.shape),
        None if dweight is None else dweight.to(a.weight.dtype),
        None if dbias is None or a.bias is None else dbias.to(a.bias.dtype),
    )
