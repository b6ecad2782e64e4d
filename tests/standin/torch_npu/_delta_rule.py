"""The recurrent delta rule of the fake torch_npu. Sources as in ``__init__.py``, and

* D12: op-plugin, ``docs/.../torch_npu-npu_recurrent_gated_delta_rule.md``, for Atlas A2 and A3: bfloat16, g and gk
  float32, lengths from 1 to 8, up to 256 heads, Dk and Dv up to 512, at least as many blocks as tokens; the state of a
  token is in the block that ``ssm_state_indices`` names.
* D13: CANN, ``aclnnRecurrentGatedDeltaRule.md``: no empty tensor; num_accepted_tokens is no null pointer; elements of
  query and key from -1 to 1.
* R7: ops-transformer, ``attention/recurrent_gated_delta_rule/op_kernel``: float32 inside; the state before a sequence
  is in the block of the last accepted token, that after each token is rounded to its block; key head h // (Nv // Nk).
"""

from __future__ import annotations

import torch
import torch_npu

_device = torch_npu._device
_library = torch_npu._library
_NAME = "npu_recurrent_gated_delta_rule"


def _refuse(sentence: str) -> None:
    torch_npu._refuse(_NAME, sentence)


def _require_like(name: str, tensor: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor is not None and (tensor.dtype != dtype or tuple(tensor.shape) != shape):
        _refuse(f"{name} must be {dtype} of shape {shape}; it is {tensor.dtype} of {tuple(tensor.shape)}.")


def _rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor,
    *,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    actual_seq_lengths: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
) -> torch.Tensor:
    required = {"beta": beta, "actual_seq_lengths": actual_seq_lengths, "ssm_state_indices": ssm_state_indices}
    required["num_accepted_tokens"] = num_accepted_tokens
    torch_npu._require_npu(_NAME, query=query, key=key, value=value, state=state, **required)
    if scale is None:
        _refuse("scale is required.")
    if query.dim() != 3 or value.dim() != 3 or state.dim() != 4:
        _refuse("query and value must have 3 dimensions, state 4.")
    (tokens, key_heads, rows), (heads, columns) = query.shape, value.shape[1:]
    half, count = torch.bfloat16, actual_seq_lengths.shape[0]
    _require_like("query", query, half, (tokens, key_heads, rows))
    _require_like("key", key, half, (tokens, key_heads, rows))
    _require_like("value", value, half, (tokens, heads, columns))
    _require_like("state", state, half, (state.shape[0], heads, columns, rows))
    _require_like("beta", beta, half, (tokens, heads))
    _require_like("g", g, torch.float32, (tokens, heads))
    _require_like("gk", gk, torch.float32, (tokens, heads, rows))
    _require_like("actual_seq_lengths", actual_seq_lengths, torch.int32, (count,))
    _require_like("num_accepted_tokens", num_accepted_tokens, torch.int32, (count,))
    _require_like("ssm_state_indices", ssm_state_indices, torch.int32, (tokens,))
    if 0 in (*query.shape, *value.shape, count):
        _refuse("empty tensors are not supported.")
    if max(key_heads, heads) > 256 or heads % key_heads or max(rows, columns) > 512:
        _refuse("there must be at most 256 heads, those of value a multiple of those of query, and 512 columns.")
    if state.shape[0] < tokens:
        _refuse(f"there must be at least {tokens} blocks; there are {state.shape[0]}.")
    lengths, blocks = _device.on_cpu(actual_seq_lengths).tolist(), _device.on_cpu(ssm_state_indices).tolist()
    accepted = _device.on_cpu(num_accepted_tokens).tolist()
    if sum(lengths) != tokens or not all(1 <= n <= 8 for n in lengths):
        _refuse(f"lengths must be from 1 to 8, together {tokens}; they are {lengths}.")
    if not all(0 <= n < state.shape[0] for n in blocks) or not all(1 <= n <= m for n, m in zip(accepted, lengths)):
        _refuse("indices must be of blocks, and accepted tokens from 1 to the length.")
    q, k, v = (_device.on_cpu(each).float() for each in (query, key, value))
    if bool((q.abs() > 1).any() | (k.abs() > 1).any()):
        _refuse("elements of query and key must be from -1 to 1.")
    given = [each for each in (query, key, value, state, beta, g, gk) if each is not None]
    torch_npu._log(_NAME, *given, scale=scale, lengths=lengths, by_row=gk is not None)
    factor = torch.ones(tokens, heads, rows, device="cpu")
    factor = factor if g is None else factor * _device.on_cpu(g).exp()[..., None]
    factor = factor if gk is None else factor * _device.on_cpu(gk).exp()
    share, all_states = _device.on_cpu(beta).float(), _device.on_cpu(state)
    q, k = (each.repeat_interleave(heads // key_heads, 1) for each in (q * scale, k))
    out, start = torch.empty(v.shape, device="cpu"), 0
    for length, last in zip(lengths, accepted):
        s = all_states[blocks[start + last - 1]].float()
        for t in range(start, start + length):
            s = s * factor[t, :, None]
            u = share[t, :, None] * (v[t] - (s * k[t, :, None]).sum(-1))
            s = s + u[..., None] * k[t, :, None]
            all_states[blocks[t]] = s.to(half)
            out[t] = (s * q[t, :, None]).sum(-1)
        start += length
    return _device.to_device(out.to(half))


_library.define(  # V, as in the wheel of 2.13.0
    "npu_recurrent_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *, Tensor? beta=None, "
    "float? scale=None, Tensor? actual_seq_lengths=None, Tensor? ssm_state_indices=None, "
    "Tensor? num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None) -> Tensor"
)
_library.impl(_NAME, _rule, "PrivateUse1")

npu_recurrent_gated_delta_rule = torch.ops.npu.npu_recurrent_gated_delta_rule
