"""Layers with a state in the place of attention: gated DeltaNet and Mamba-2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter
from torch.nn.functional import softplus

from fusedops import ops
from fusedops.dtypes import arithmetic
from fusedops.errors import InvalidInputError
from fusedops.nn._repr import backend_repr

_STEPS = (1e-3, 1e-1)  # of a new layer: the range of softplus(dt_bias)
_RATES = (1.0, 16.0)  # of a new layer: the range of exp(A_log)


class MixerState(NamedTuple):
    """The state of a layer after a position. Its size does not depend on the number of positions.

    Attributes:
        convolution: (B, C, W - 1), the last inputs of the convolution, the dtype of x.
        recurrence: (B, heads, key or state size, value or head size), float32, or float64 for float64.

    >>> import torch, fusedops
    >>> layer = fusedops.nn.Mamba2(32, heads=4, head_size=8, state_size=16)
    >>> for length in (1, 100):
    ...     _, state = layer(torch.randn(1, length, 32), return_state=True)
    ...     print(state.convolution.shape, state.recurrence.shape)
    torch.Size([1, 64, 3]) torch.Size([1, 4, 16, 8])
    torch.Size([1, 64, 3]) torch.Size([1, 4, 16, 8])
    """

    convolution: Tensor
    recurrence: Tensor


class _Mixer(Module):
    """The parts that both layers have: a short convolution, a decay for each head, a gated norm, a projection out."""

    eps: float
    backend: str | None

    def __init__(self, width: int, channels: int, heads: int, out: int, conv: dict[str, Any], norm: int) -> None:
        super().__init__()
        size = conv.pop("size")
        self.width = width
        self.heads = heads
        self.channels = channels
        self.conv1d = nn.Conv1d(channels, channels, size, groups=channels, padding=size - 1, **conv)
        options = {name: conv[name] for name in ("device", "dtype")}
        self.dt_bias, self.A_log = (Parameter(torch.empty(heads, **options)) for _ in range(2))
        self.norm = nn.RMSNorm(norm, **options)
        self.out_proj = nn.Linear(out, width, bias=False, **options)
        self._reset_decay()

    def forward(
        self,
        x: Tensor,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> Any:
        """Compute the layer for the positions of x, which follow those of the state.

        Args:
            x: (B, S, width).
            state: after the positions before x, or None.
            return_state: also return the state after x.
            cu_seqlens: (N + 1,), the bounds of packed sequences in a batch of 1; the states are then (N, ...).

        Returns:
            (B, S, width); with ``return_state`` the pair (y, :class:`MixerState`).

        Raises:
            InvalidInputError: an argument or a setting is not as above.
            NoBackendError: the policy forbids a fallback and its backend does not take the call.
        """
        options: dict[str, Any] = {"return_state": return_state, "cu_seqlens": cu_seqlens, "backend": self.backend}
        gate, projected, *rest = self._projected(x)
        mixed, inputs = self._convolved(projected, state, options)
        out, after = self._attended(
            mixed, rest, {"initial_state": None if state is None else state.recurrence, **options}
        )
        y = self.out_proj(self._gated(out, gate))
        return (y, MixerState(inputs, after)) if inputs is not None and after is not None else y

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return projections of x: the gate, what the convolution reads, and what the recurrence takes besides."""
        raise NotImplementedError

    def _attended(self, mixed: Tensor, rest: Sequence[Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return the output of the recurrence of the convolved positions, and its state or None."""
        raise NotImplementedError

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """Return the gated norm of the output, (B, S, heads * size)."""
        raise NotImplementedError

    def _reset_decay(self) -> None:
        """Set the steps between 0.001 and 0.1, evenly in their logarithm, and the rates evenly between 1 and 16."""
        low, high = (math.log(each) for each in _STEPS)
        with torch.no_grad():
            steps = self.dt_bias.uniform_(low, high).exp()
            self.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # softplus of it is the step
            self.A_log.uniform_(*_RATES).log_()

    def _convolved(self, x: Tensor, state: MixerState | None, options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return the convolution of x, (B, S, C), and its state."""
        before = None if state is None else state.convolution
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        result = ops.causal_conv1d(x.mT, weight, bias, activation="silu", initial_state=before, **options)
        y, after = result if options["return_state"] else (result, None)
        return y.mT, after

    def _steps(self, dt: Tensor) -> tuple[Tensor, Tensor]:
        """Return the steps, (B, S, heads), and the decay of each, in float32, or float64 for float64."""
        wide = arithmetic(dt, self.dt_bias)
        steps = softplus(dt.to(wide) + self.dt_bias.to(wide))
        return steps, -self.A_log.to(wide).exp() * steps


class GatedDeltaNet(_Mixer):
    """The layer of gated DeltaNet (Yang et al. 2024, arXiv:2412.06464), as Qwen3.5 has it in the place of attention.

    It computes :func:`fusedops.causal_conv1d`, :func:`fusedops.linear_attention` with a decay and the delta rule, and
    :func:`fusedops.gated_rms_norm` between linear projections. State dicts of transformers' ``Qwen3_5GatedDeltaNet``
    load: the parameters have the same names.

    Args:
        width: of x.
        heads: of the values.
        key_heads: of queries and keys; divides ``heads``. None: ``heads``.
        key_size: of a head's queries and keys.
        value_size: of a head's values.
        conv_width: positions that the convolution reads, from 2 to 8.
        eps: of the norm.
        backend: a policy for this module's ops alone, such as "triton" or "cpu,eager". None: the policy in effect.
        device: of the parameters.
        dtype: of the parameters.

    >>> import torch, fusedops
    >>> layer = fusedops.nn.GatedDeltaNet(32, heads=4, key_heads=2, key_size=8, value_size=8)
    >>> x = torch.randn(1, 6, 32)
    >>> y, state = layer(x[:, :5], return_state=True)
    >>> last = layer(x[:, 5:], state)
    >>> torch.allclose(torch.cat((y, last), 1), layer(x), atol=1e-6)
    True
    """

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        key_heads: int | None = None,
        key_size: int = 128,
        value_size: int = 128,
        conv_width: int = 4,
        eps: float = 1e-6,
        backend: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        key_heads = heads if key_heads is None else key_heads
        _check_divides("GatedDeltaNet", "key_heads", key_heads, heads)
        keys, values = key_heads * key_size, heads * value_size
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        conv = {"size": conv_width, "bias": False, **options}
        super().__init__(width, 2 * keys + values, heads, values, conv, value_size)
        self.key_heads = key_heads
        self.key_size = key_size
        self.value_size = value_size
        self.eps = eps
        self.backend = backend
        self.in_proj_qkv = nn.Linear(width, self.channels, bias=False, **options)
        self.in_proj_z = nn.Linear(width, values, bias=False, **options)
        self.in_proj_b = nn.Linear(width, heads, bias=False, **options)
        self.in_proj_a = nn.Linear(width, heads, bias=False, **options)

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.in_proj_z(x), self.in_proj_qkv(x), self.in_proj_a(x), self.in_proj_b(x)

    def _attended(self, mixed: Tensor, rest: Sequence[Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        keys = self.key_heads * self.key_size
        q, k, v = mixed.split_with_sizes((keys, keys, self.heads * self.value_size), -1)
        q, k, v = _by_head(q, self.key_heads), _by_head(k, self.key_heads), _by_head(v, self.heads)
        dt, beta = rest
        _, decay = self._steps(dt)
        result = ops.linear_attention(q, k, v, decay, beta.sigmoid(), normalize=True, **options)
        return result if options["return_state"] else (result, None)

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        gate = _by_head(gate, self.heads)
        return ops.gated_rms_norm(out, gate, self.norm.weight, self.eps, backend=self.backend).flatten(-2)

    def extra_repr(self) -> str:
        """Return the settings, for ``print(model)``."""
        text = f"{self.width}, heads={self.heads}, key_heads={self.key_heads}, key_size={self.key_size}, "
        return text + f"value_size={self.value_size}, eps={self.eps}" + backend_repr(self.backend)


class Mamba2(_Mixer):
    """The layer of Mamba-2 (Dao & Gu 2024, arXiv:2405.21060), as Bamba and Granite 4 have it in the place of attention.

    It computes :func:`fusedops.causal_conv1d`, :func:`fusedops.linear_attention` with a decay, and
    :func:`fusedops.gated_rms_norm` with the gate first, between linear projections. State dicts of transformers'
    ``BambaMixer`` and ``Mamba2Mixer`` without biases of their projections load: the parameters have the same names.

    Args:
        width: of x.
        heads: of the values.
        head_size: of a head's values.
        state_size: of the queries and keys, which a group of heads shares.
        groups: of heads; divides ``heads``.
        conv_width: positions that the convolution reads, from 2 to 8.
        eps: of the norm.
        backend: a policy for this module's ops alone, such as "triton" or "cpu,eager". None: the policy in effect.
        device: of the parameters.
        dtype: of the parameters.

    >>> import torch, fusedops
    >>> layer = fusedops.nn.Mamba2(32, heads=8, head_size=8, state_size=16)
    >>> x = torch.randn(1, 6, 32)
    >>> y, state = layer(x[:, :5], return_state=True)
    >>> last = layer(x[:, 5:], state)
    >>> torch.allclose(torch.cat((y, last), 1), layer(x), atol=1e-6)
    True
    """

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        head_size: int = 64,
        state_size: int = 128,
        groups: int = 1,
        conv_width: int = 4,
        eps: float = 1e-5,
        backend: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_divides("Mamba2", "groups", groups, heads)
        values = heads * head_size
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        conv = {"size": conv_width, "bias": True, **options}
        super().__init__(width, values + 2 * groups * state_size, heads, values, conv, values)
        self.head_size = head_size
        self.state_size = state_size
        self.groups = groups
        self.eps = eps
        self.backend = backend
        self.in_proj = nn.Linear(width, values + self.channels + heads, bias=False, **options)
        self.D = Parameter(torch.ones(heads, **options))

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.in_proj(x).split_with_sizes((self.heads * self.head_size, self.channels, self.heads), -1)

    def _attended(self, mixed: Tensor, rest: Sequence[Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        values, keys = self.heads * self.head_size, self.groups * self.state_size
        v, k, q = mixed.split_with_sizes((values, keys, keys), -1)
        steps, decay = self._steps(rest[0])
        q, k = (_by_head(each, self.groups).to(steps.dtype) for each in (q, k))
        v = _by_head(v, self.heads).to(steps.dtype)
        result = ops.linear_attention(q, k, v * steps[..., None], decay, scale=1.0, **options)
        out, after = result if options["return_state"] else (result, None)
        return torch.addcmul(out, v, self.D.to(v.dtype)[:, None]).flatten(-2).to(mixed.dtype), after

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        weight = self.norm.weight
        return ops.gated_rms_norm(out, gate, weight, self.eps, gate_first=True, backend=self.backend)

    def extra_repr(self) -> str:
        """Return the settings, for ``print(model)``."""
        text = f"{self.width}, heads={self.heads}, head_size={self.head_size}, state_size={self.state_size}, "
        return text + f"groups={self.groups}, eps={self.eps}" + backend_repr(self.backend)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Return (..., heads * size) as (..., heads, size)."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def _check_divides(module: str, name: str, count: int, heads: int) -> None:
    if count < 1 or heads % count:
        raise InvalidInputError(
            f"{module}: got {name} = {count} for {heads} heads, expected a divisor of them; to fix: {name}=1"
        )
