"""The experts of a mixture whose weights are packed: 4 to 8 bits a weight, in the formats of GGUF files and of the Hub.
Replaces the experts that transformers unpacks where its own kernels do not run.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Saved
from fusedops._dispatch.call import call
from fusedops.errors import InvalidInputError
from fusedops.ops.experts.arguments import (
    LORA,
    QUANTIZED,
    ExpertsArgs,
    ExpertsGradArgs,
    QuantizedExpertsArgs,
    QuantizedExpertsGradArgs,
    with_factors,
)
from fusedops.ops.experts.formulas import experts_backward, experts_hidden, experts_reference
from fusedops.quantization import Packed, dequantize, weights_of_row
from fusedops.quantization._scaled import unpack_rows


def quantized_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Packed | Tensor,
    down: Packed | Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: Literal["swiglu", "geglu", "geglu_tanh", "silu", "gelu", "gelu_tanh", "relu", "relu2"] = "swiglu",
    limit: float | None = None,
    alpha: float = 1.0,
    offset: float = 0.0,
    interleaved: bool = False,
    up_format: str | None = None,
    down_format: str | None = None,
    up_scales: Tensor | None = None,
    up_global_scale: Tensor | None = None,
    up_zeros: Tensor | None = None,
    down_scales: Tensor | None = None,
    down_global_scale: Tensor | None = None,
    down_zeros: Tensor | None = None,
    up_lora: tuple[Tensor, Tensor] | Tensor | None = None,
    up_lora_b: Tensor | None = None,
    down_lora: tuple[Tensor, Tensor] | Tensor | None = None,
    down_lora_b: Tensor | None = None,
    lora_scale: float = 1.0,
    backend: str | None = None,
) -> Tensor:
    """Compute :func:`fusedops.experts` with packed weights, as ``fusedops.experts`` does for two Packed.

    Each weight has the exact value of its format, activations are not quantized, and products are summed in float32.
    An expert that no token chose is not read.

    Args:
        x: (T, H), the tokens, float16, bfloat16, float32 or float64.
        index: (T, K), int64 or int32, the experts of each token, as of :func:`fusedops.experts`.
        weights: (T, K), the weight of each choice, any of the same dtypes as ``x``.
        up: a :class:`fusedops.quantization.Packed` of shape (E, 2I, H), or (E, I, H) for the activations without a
            gate; or its codes, uint8 (E, rows, bytes of a row). It has no gradient, as ``down``.
        down: a Packed of shape (E, H, I), or its codes.
        up_bias: (E, 2I) or (E, I), any of the same dtypes as ``x``, or None.
        down_bias: (E, H), any of the same dtypes, or None.
        activation: as of :func:`fusedops.experts`.
        limit: likewise.
        alpha: likewise.
        offset: likewise.
        interleaved: the rows of gate and of the others alternate, as gpt-oss has them.
        up_format: of codes: a format of GGUF, or one of the Hub. None for a Packed, which has its own.
        down_format: likewise.
        up_scales: of codes, as the tensor of that name of a Packed; None for a Packed.
        up_global_scale: likewise.
        up_zeros: likewise.
        down_scales: likewise.
        down_global_scale: likewise.
        down_zeros: likewise.
        up_lora: factors of LoRA, as of :func:`fusedops.experts`.
        up_lora_b: likewise.
        down_lora: likewise.
        down_lora_b: likewise.
        lora_scale: likewise.
        backend: a policy for this call alone, such as "cpu" or "npu,eager". None: the policy in effect.

    Returns:
        (T, H), contiguous, the dtype of ``x``. Computed in float32 (float64 for float64), the sum in the order of K,
        and rounded once. Gradients are those of ``x``, ``weights``, the biases and the
        factors.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: transformers, ``integrations/mxfp4.py``; as of :func:`fusedops.experts` and
    :class:`fusedops.quantization.Packed`.

    >>> import torch, fusedops
    >>> up, down = (fusedops.quantization.pack(torch.ones(shape), "MXFP4") for shape in ((3, 64, 32), (3, 32, 32)))
    >>> x, index = torch.full((2, 32), 0.125), torch.tensor([[0, 2], [1, 3]])
    >>> fusedops.quantized_experts(x, index, torch.full((2, 2), 0.5), up, down)[:, 0]
    tensor([502.7910, 251.3955])
    """
    args = (x, index, weights, up, down, up_bias, down_bias, activation, limit, alpha, offset, interleaved)
    of_up, of_down = (up_scales, up_global_scale, up_zeros), (down_scales, down_global_scale, down_zeros)
    factors = (up_lora, up_lora_b, down_lora, down_lora_b, lora_scale)
    return call(OP, prepare_args((*args, up_format, down_format, *of_up, *of_down, *factors)), backend)


def prepare_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with the tensors of each Packed, and the factors of each pair, in their places."""
    given = QuantizedExpertsArgs(*args)
    a = with_factors(given)
    if a is given and not isinstance(a.up, Packed) and not isinstance(a.down, Packed):  # pyright: ignore[reportUnnecessaryIsInstance]
        return args
    for name in ("up", "down"):
        packed: Any = getattr(a, name)
        if not isinstance(packed, Packed):
            continue
        parts = [f"{name}_{part}" for part in ("scales", "global_scale", "zeros")]
        if getattr(a, f"{name}_format") not in (None, packed.format) or any(getattr(a, p) is not None for p in parts):
            raise InvalidInputError(
                f"quantized_experts: got a Packed of {packed.format} as {name} beside a format or scales of its own, "
                f"expected one of both; to fix: leave out {name}_format, {', '.join(parts)}"
            )
        values = dict(zip(parts, (packed.scales, packed.global_scale, packed.zeros)))
        a = a._replace(**{name: packed.codes, f"{name}_format": packed.format}, **values)
    return tuple(a)


def unpacked(a: QuantizedExpertsArgs | QuantizedExpertsGradArgs) -> tuple[Tensor, Tensor]:
    """Return up and down in float32."""
    first = _weight(a.up_format, a.up, a.up_scales, a.up_global_scale, a.up_zeros)
    return first, _weight(a.down_format, a.down, a.down_scales, a.down_global_scale, a.down_zeros)


def _weight(
    format: str | None, codes: Tensor, scales: Tensor | None, global_scale: Tensor | None, zeros: Tensor | None
) -> Tensor:
    assert format is not None  # by the op's constraints
    if codes.is_meta:  # no data
        return codes.new_empty((*codes.shape[:-1], weights_of_row(codes.shape[-1], format)), dtype=torch.float32)
    if scales is None:
        return dequantize(codes, format, torch.float32)
    return unpack_rows(format, codes, scales, global_scale, zeros)


def with_unpacked(a: QuantizedExpertsArgs) -> ExpertsArgs:
    """Return the arguments of experts with the same weights."""
    return ExpertsArgs(*a[:3], *unpacked(a), *a[5:12], False, *a[-5:])


def gradients_with_unpacked(a: QuantizedExpertsGradArgs) -> ExpertsGradArgs:
    """Return the arguments of the backward of experts with the same weights, of which it has no gradient."""
    needs = (*a.needs[:2], False, False, *a.needs[2:])
    return ExpertsGradArgs(*a[:4], *unpacked(a), *a[6:14], False, *a[-6:-1], needs=needs)


def without_weights(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what experts has for each of its differentiable arguments, for those of this op."""
    return (*gradients[:2], *gradients[4:])


def reference(a: QuantizedExpertsArgs) -> Tensor:
    """Compute the op in plain torch, with unpacked weights."""
    return experts_reference(with_unpacked(a))


def hidden(
    x: Tensor,
    index: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    up_format: str | None,
    up_scales: Tensor | None,
    up_global_scale: Tensor | None,
    up_zeros: Tensor | None,
    up_lora: Tensor | None,
    up_lora_b: Tensor | None,
    lora_scale: float,
) -> Tensor:
    """Compute the saved value, as of experts."""
    wide = _weight(up_format, up, up_scales, up_global_scale, up_zeros)
    return experts_hidden(x, index, wide, wide, up_bias, False, up_lora, up_lora_b, lora_scale)


def backward(args: QuantizedExpertsGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, weights, the biases and the factors."""
    return without_weights(experts_backward(gradients_with_unpacked(args)))


OP = Op(
    quantized_experts,
    constraints=QUANTIZED,
    reference=reference,
    backward=backward,
    differentiable=("x", "weights", "up_bias", "down_bias", *LORA),
    saved=(Saved("hidden", hidden),),
    prepare_args=prepare_args,
    sharding="fusedops.ops.experts.sharding:EXPERTS",
    evidence="fusedops.ops.experts.evidence:QUANTIZED_EXPERTS",
)
