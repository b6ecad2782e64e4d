"""The product of each group of rows with the weight of its expert (Gale et al. 2022, arXiv:2211.15841). Replaces
torch's grouped_mm, torch_npu's npu_grouped_matmul, and the grouped_gemm of Megatron and MegaBlocks.
"""

from __future__ import annotations

from torch import Tensor

from fusedops._contract.op import Op
from fusedops._dispatch.call import call
from fusedops.dtypes import arithmetic
from fusedops.ops.experts.arguments import GROUPED
from fusedops.ops.experts.formulas import group_of_rows, linear, linear_gradients, stacked


def grouped_matmul(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    transposed: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Compute ``x[i] @ weight[e].T + bias[e]`` for each row i of group e.

    The rows of ``x`` are sorted by group: those of group e end before ``offsets[e]``, and start where the group before
    it ends. Rows past the last end are 0, and so are their gradients; the gradients of a group without rows are 0.
    torch's ``grouped_mm`` leaves these numbers uninitialised.

    Args:
        x: (S, K), float16, bfloat16, float32 or float64.
        weight: (E, N, K), any of the same dtypes.
        offsets: (E,), int32 or int64, the end of the rows of each group: the sum of the sizes of the groups up to it.
            It has no gradient. One that falls or passes S is an InvalidInputError on a CPU. On another device, which
            is not waited for, it is clamped: to [0, S], then to the largest one before it.
        bias: (E, N), any of the same dtypes, or None.
        transposed: ``weight`` is (E, K, N).
        backend: a policy for this call alone, such as "eager" or "npu,eager". None: the policy in effect.

    Returns:
        (S, N), contiguous, the dtype of ``x``. Products are summed in float32 (float64 if ``x`` or ``weight`` is) and
        rounded once; kernels that have 16-bit products round them before they add the bias. Gradients are summed in
        float32, each rounded to the dtype of its tensor.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: torch, ``torch.nn.functional.grouped_mm``; transformers, ``integrations/moe.py``; Megatron-LM,
    ``megatron/core/transformer/moe/experts.py``.

    >>> import torch, fusedops
    >>> x, weight = torch.ones(4, 2), torch.arange(4.0).reshape(2, 1, 2)
    >>> fusedops.grouped_matmul(x, weight, torch.tensor([1, 3]))
    tensor([[1.],
            [5.],
            [5.],
            [0.]])
    """
    return call(OP, (x, weight, offsets, bias, transposed), backend)


def reference(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Compute the op in plain torch: each weight on every row, of which those of other groups count as 0."""
    wide = x.to(arithmetic(x, weight))
    group = group_of_rows(offsets, x.shape[0])
    y = wide.new_zeros(x.shape[0], weight.shape[2 if transposed else 1])
    for e in range(weight.shape[0]):
        absent = (group != e)[:, None]
        product = linear(wide.masked_fill(absent, 0.0), weight[e], None if bias is None else bias[e], transposed)
        y = y.where(absent, product)
    return y.to(x.dtype)


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    transposed: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, weight and bias, each group on every row."""
    dtype = arithmetic(x, weight)
    group = group_of_rows(offsets, x.shape[0])
    wide, g_wide = x.to(dtype), grad.to(dtype)
    dx = wide.new_zeros(x.shape)
    of_weight: list[Tensor] = []
    of_bias: list[Tensor] = []
    for e in range(weight.shape[0]):
        absent = (group != e)[:, None]
        g = g_wide.masked_fill(absent, 0.0)
        rows, of_group = linear_gradients(g, wide.masked_fill(absent, 0.0), weight[e], transposed)
        dx = dx.where(absent, rows)
        of_weight.append(of_group)
        of_bias.append(g.sum(0))
    return (
        dx.to(x.dtype) if needs[0] else None,
        stacked(of_weight, weight) if needs[1] else None,
        stacked(of_bias, bias) if needs[2] and bias is not None else None,
    )


def empty(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return an empty output."""
    return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])


OP = Op(
    grouped_matmul,
    constraints=GROUPED,
    reference=reference,
    backward=backward,
    differentiable=("x", "weight", "bias"),
    empty=empty,
    sharding="fusedops.ops.experts.sharding:GROUPED_MATMUL",
    evidence="fusedops.ops.experts.evidence:GROUPED_MATMUL",
)
