"""Megatron's functions with ops in their place. Megatron's own computes what the op does not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from fusedops import ops
from fusedops.compat import megatron as dropins
from fusedops.integrations.megatron._left import warn_left

_Function = Callable[..., Any]
_NO_CHANGE = "no change is needed"


def swiglu(own: _Function) -> _Function:
    """Return bias_swiglu_impl with :func:`fusedops.swiglu`."""

    @wraps(own)
    def bias_swiglu_impl(
        input: Tensor, bias: Tensor | None, fp8_input_store: bool = False, cpu_offload_input: bool = False
    ) -> Any:
        for name, given in (("fp8_input_store", fp8_input_store), ("cpu_offload_input", cpu_offload_input)):
            if given:
                warn_left("bias_swiglu_impl", f"{name} = True", "False", "set it to False in the config")
                return own(input, bias, fp8_input_store, cpu_offload_input)
        return ops.swiglu(input if bias is None else input + bias)

    return bias_swiglu_impl


def geglu(own: _Function) -> _Function:
    """Return bias_geglu_impl with :func:`fusedops.geglu`."""

    @wraps(own)
    def bias_geglu_impl(input: Tensor, bias: Tensor | None) -> Any:
        return ops.geglu(input if bias is None else input + bias)

    return bias_geglu_impl


def gelu(own: _Function) -> _Function:
    """Return bias_gelu_impl with :func:`fusedops.bias_gelu`."""

    def bias_gelu_impl(input: Tensor, bias: Tensor | None) -> Any:
        return ops.bias_gelu(input, bias)

    return bias_gelu_impl


def dropout(own: _Function) -> _Function:
    """Return get_bias_dropout_add with :func:`fusedops.bias_dropout_add`."""

    @wraps(own)
    def get_bias_dropout_add(training: bool, fused: bool) -> Any:
        return dropins.get_bias_dropout_add(training, fused)

    return get_bias_dropout_add


def dropin(own: Any) -> Any:
    """Return the drop-in of fusedops.compat.megatron with the name of one of Megatron's classes.

    It is a class of its own: the drop-in itself is held by modules that are not Megatron's.
    """
    ours: type[Any] = getattr(dropins, own.__name__)
    names: dict[str, Any] = {"__module__": ours.__module__, "__doc__": ours.__doc__}
    if "_op" in vars(ours):  # a subclass of an OpFunction does not inherit it
        names["_op"] = vars(ours)["_op"]
    return type(own.__name__, (ours,), names)


# ---------------------------------------------------------------------------------------------------------------- rope


def rope(own: _Function) -> _Function:
    """Return apply_rotary_pos_emb with :func:`fusedops.rotary_embedding`."""
    newest = "mla_rotary_interleaved"  # None, and where it is no parameter: as the config has it
    parameters = inspect.signature(own).parameters
    default = parameters[newest].default if newest in parameters else None

    @wraps(own)
    def apply_rotary_pos_emb(
        t: Tensor,
        freqs: Tensor,
        config: Any,
        cu_seqlens: Tensor | None = None,
        mscale: float = 1.0,
        cp_group: Any = None,
        mla_rotary_interleaved: bool | None = default,
    ) -> Any:
        moved = config.multi_latent_attention if mla_rotary_interleaved is None else mla_rotary_interleaved
        reason = _not_served(t, freqs, config.rotary_interleaved, cu_seqlens, moved)
        if reason is None:
            return rotated(t, freqs, config.rotary_interleaved, mscale)
        warn_left("apply_rotary_pos_emb", *reason)
        rest = {newest: mla_rotary_interleaved} if newest in parameters else {}
        return own(t, freqs, config, cu_seqlens, mscale, cp_group, **rest)

    return apply_rotary_pos_emb


def _not_served(
    t: Tensor, freqs: Tensor, interleaved: bool, cu_seqlens: Tensor | None, moved: bool
) -> tuple[str, str, str] | None:
    """Return what the op does not compute, what it needs and the fix, or None."""
    if cu_seqlens is not None:
        return "packed sequences (cu_seqlens)", "sequences of a batch", "pass a batch"
    if moved:
        return "pairs that are moved to halves, for multi-latent attention", "pairs that stay", _NO_CHANGE
    if t.dim() != 4 or freqs.dim() != 4 or freqs.shape[:3] not in {(*t.shape[:2], 1), (t.shape[0], 1, 1)}:
        given = f"t {list(t.shape)} and freqs {list(freqs.shape)}"
        return given, "t (s, b, n, d) and freqs (s, 1 or b, 1, r)", _NO_CHANGE
    if freqs.requires_grad:
        return "freqs that require grad", "freqs without", "pass freqs.detach() if they are not trained"
    on_cpu = freqs.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_cpu and not torch.equal(*_angles(freqs, interleaved)):  # elsewhere it would wait for the device
        return "two angles for the elements of a pair", "one", _NO_CHANGE
    return None


def _angles(freqs: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return the angles of the first and of the second elements of all pairs."""
    if interleaved:
        return freqs[..., ::2], freqs[..., 1::2]
    half = freqs.shape[-1] // 2
    return freqs[..., :half], freqs[..., half:]


def rotated(t: Tensor, freqs: Tensor, interleaved: bool, mscale: float) -> Tensor:
    """Return t, rotated by Megatron's angles, of which each is given twice.

    Args:
        t: (s, b, n, d), any floating dtype.
        freqs: (s, 1 or b, 1, r), float32, r at most d.
        interleaved: as in the op.
        mscale: a factor of the cosines and sines.

    Returns:
        (s, b, n, d), contiguous, the dtype of ``t``. A batch of one sequence of b * n heads, or of s * b positions
        where each sequence has its own angles, is a view of it: Megatron has the sequence first.

    >>> t, quarter_turn = torch.tensor([[[[1.0, 2.0]]]]), torch.full((1, 1, 1, 2), torch.pi / 2)
    >>> rotated(t, quarter_turn, False, 1.0)
    tensor([[[[-2.0000,  1.0000]]]])
    """
    s, b, n, d = t.shape
    angles = _angles(freqs, interleaved)[0].flatten(0, 2)
    cos, sin = torch.cos(angles) * mscale, torch.sin(angles) * mscale
    heads = t.reshape(1, s, b * n, d) if freqs.shape[1] == 1 else t.reshape(1, s * b, n, d)
    out, _ = ops.rotary_embedding(heads, None, cos, sin, interleaved=interleaved, seq_dim=-3)
    return out.view(s, b, n, d)
