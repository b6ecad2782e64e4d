"""squared_relu: the activation of Nemotron's MLP."""

from __future__ import annotations

from torch import Tensor

from fusedops._contract.op import Op
from fusedops._dispatch.call import call
from fusedops.constraints import Floating
from fusedops.dtypes import upcast


def squared_relu(x: Tensor, *, backend: str | None = None) -> Tensor:
    """Compute ``relu(x) ** 2``.

    Args:
        x: (...), float16, bfloat16, float32 or float64, any strides.
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        (...), contiguous, the dtype of ``x``. Computed in float32 (float64 for float64).

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: So et al. 2021, arXiv:2109.08668; transformers, ``ACT2FN["relu2"]``.

    >>> import torch, fusedops
    >>> fusedops.squared_relu(torch.tensor([-1.0, 3.0]))
    tensor([0., 9.])
    """
    return call(OP, (x,), backend)


def reference(x: Tensor) -> Tensor:
    """Compute the op in plain torch."""
    return upcast(x).relu().square().to(x.dtype)


def backward(grad: Tensor, x: Tensor) -> Tensor:
    """Compute the gradient of x from the inputs."""
    return (upcast(grad) * 2 * upcast(x).relu()).to(x.dtype)


OP = Op(
    squared_relu,
    constraints=[Floating("x")],
    reference=reference,
    backward=backward,
    differentiable=("x",),
    evidence="fusedops.ops.activations.evidence:SQUARED_RELU",
)
