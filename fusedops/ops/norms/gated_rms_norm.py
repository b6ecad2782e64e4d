"""RMSNorm beside a gate, the norm of linear attention and state space models: Qwen3-Next and Qwen3.5, Kimi Linear,
Mamba-2 (Dao & Gu 2024, arXiv:2405.21060), Granite 4, Zamba2, Nemotron-H. Replaces the chain silu -> mul -> rms_norm.
"""

from __future__ import annotations

from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Saved
from fusedops._dispatch.call import call
from fusedops.ops.norms import arguments, formulas, rms_norm
from fusedops.ops.norms.arguments import GatedRmsNormArgs, GatedRmsNormGradArgs


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    gate_first: bool = False,
    activation: str = "silu",
    groups: int = 1,
    offset: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """Compute ``rms_norm(x) * act(gate)``, or ``rms_norm(x * act(gate))`` with ``gate_first``.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64.
        gate: the shape of ``x``, any of the same dtypes.
        weight: (H,), any of the same dtypes, or None for no factor; ``offset`` is not used then. It multiplies the
            normalized numbers, in both orders.
        eps: added to the mean square; finite, at least 0.
        gate_first: True: the norm is that of ``x * act(gate)``, as in Mamba-2, Granite 4 and Nemotron-H. False: the
            gate multiplies the norm of x, as in Qwen3-Next and Kimi Linear.
        activation: act: "silu", ``gate * sigmoid(gate)``, or "sigmoid", as in Kimi Linear.
        groups: equal parts of a row, each of which has a norm of its own; a divisor of H. 8 in Nemotron-H.
        offset: added to the weight. 1.0 for models that keep ``weight - 1``.
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        (..., H), contiguous, the dtype of ``x``. Computed in float32 (float64 if x or gate has it) and rounded once. A
        gate of -inf gives 0 where x is finite. The gradient of ``weight`` is summed in float32, in the same order on
        every run.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: transformers, ``Qwen3NextRMSNormGated``, ``MambaRMSNormGated`` and ``Zamba2RMSNormGated``; mamba_ssm,
    ``RMSNormGated``, whose ``norm_before_gate`` is ``not gate_first``.

    >>> import torch, fusedops
    >>> fusedops.gated_rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0]), eps=0.0)
    tensor([0.0000, 1.9930])
    """
    return call(OP, (x, gate, weight, eps, gate_first, activation, groups, offset), backend)


def reference(a: GatedRmsNormArgs) -> Tensor:
    """Compute the op in plain torch."""
    return formulas.gated_norm(*a)[0]


def rstd(x: Tensor, gate: Tensor, eps: float, gate_first: bool, activation: str, groups: int) -> Tensor:
    """Compute the saved value: rsqrt of the mean square of each group + eps, (..., groups)."""
    return formulas.gated_norm(x, gate, None, eps, gate_first, activation, groups, 0.0)[1]


def backward(a: GatedRmsNormGradArgs) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, gate and weight."""
    return formulas.gated_gradients(*a)


OP = Op(
    gated_rms_norm,
    constraints=[*rms_norm.OP.constraints, *arguments.GATE],
    reference=reference,
    backward=backward,
    differentiable=("x", "gate", "weight"),
    saved=(Saved("rstd", rstd),),
    sharding="fusedops.ops.norms.sharding:SHARDING",
    evidence="fusedops.ops.norms.evidence:GATED_RMS_NORM",
)
