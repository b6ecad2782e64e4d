"""Attention for Megatron's specs: DotProductAttention with :func:`fusedops.attention`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedops import ops
from fusedops.compat._masks import get_sliding_window_causal_mask
from fusedops.compat._sink import union
from fusedops.compat._softmax import not_square
from fusedops.compat._softmax_modules import FusedScaleMaskSoftmax
from fusedops.integrations._sinks import with_sinks
from fusedops.integrations.megatron._core import core
from fusedops.integrations.megatron._left import Needed, check, refusal, warn_left

_DotProductAttention: Any = core("transformer.dot_product_attention").DotProductAttention

_TE = "or use Megatron's spec of Transformer Engine"
_NEEDED = (
    Needed("context_parallel_size", 1, f"set it to 1, {_TE}"),
    Needed("multi_latent_attention", False, f"set it to False, {_TE}: the heads of keys and values differ in size"),
    Needed("qk_clip", False, f"set it to False, {_TE}: it needs the largest score of each head"),
    Needed("log_max_attention_logit", False, f"set it to False, {_TE}: it needs the largest score of each head"),
    Needed("fp8_dot_product_attention", False, f"set it to False, {_TE}"),
    Needed("fp8_multi_head_attention", False, f"set it to False, {_TE}"),
    Needed("batch_invariant_mode", False, f"set it to False, {_TE}"),
)
_CAUSAL = ("causal", "padding_causal")


class CoreAttention(_DotProductAttention):
    """Megatron's DotProductAttention with :func:`fusedops.attention`. No scores are kept, and keys are not repeated.

    Masks, causal attention, ``window_size``, ``softmax_type``, grouped heads and ``apply_query_key_layer_scaling`` are
    served. In training with ``attention_dropout``, which the op does not have, Megatron's own code computes the call
    with :func:`fusedops.scaled_masked_softmax`, and a FusedOpsWarning names the reason.

    Args:
        config: Megatron's TransformerConfig.
        *args: as in DotProductAttention.
        **kwargs: as in DotProductAttention.

    Raises:
        InvalidInputError: the config has context parallelism, multi-latent attention, ``qk_clip``,
            ``log_max_attention_logit``, attention in 8 bits or ``batch_invariant_mode``.

    Source: Megatron-LM, ``megatron/core/transformer/dot_product_attention.py``.

    >>> from megatron.core.transformer.dot_product_attention import DotProductAttention
    >>> issubclass(CoreAttention, DotProductAttention)
    True
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        check("CoreAttention", config, _NEEDED)
        super().__init__(config, *args, **kwargs)
        own = self.scale_mask_softmax
        self.window_size: tuple[int, int] | None = own.window_size
        self.scale = float(self.softmax_scale * (1.0 if own.scale is None else own.scale))
        self.scale_mask_softmax = FusedScaleMaskSoftmax(
            own.input_in_fp16,
            own.input_in_bf16,
            own.attn_mask_type,
            True,
            None,
            own.softmax_in_fp32,
            own.scale,
            own.window_size,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Compute the attention of each head.

        Args:
            query: (sq, b, np, hn), float16, bfloat16 or float32.
            key: (sk, b, ng, hn), the dtype of ``query``; np is a multiple of ng.
            value: as ``key``.
            attention_mask: bool or uint8, broadcastable to (b, np, sq, sk), True where masked out; or None. It applies
                in addition to the window, and in addition to the causal mask if sq == sk.
            attn_mask_type: Megatron's enum; None: the layer's own.
            attention_bias: None.
            packed_seq_params: None.

        Returns:
            (sq, b, np * hn), the dtype of ``query``.

        Raises:
            InvalidInputError: a bias or packed sequences are given, or an argument violates a constraint of the op.
            AssertionError: the type is causal, sq > 1, sq != sk, and there is no mask.
        """
        if attention_bias is not None:
            raise refusal("CoreAttention", "an attention_bias", "None", f"leave it out, {_TE}")
        if packed_seq_params is not None:
            raise refusal(
                "CoreAttention",
                "packed sequences (packed_seq_params)",
                "sequences of a batch",
                f"pass a batch with the mask of fusedops.masks.from_lengths, {_TE}",
            )
        dropout = self.attention_dropout.p if self.training else 0.0
        if dropout > 0:
            warn_left(
                "CoreAttention",
                f"attention_dropout = {dropout:g} in training",
                "0",
                "set attention_dropout=0.0; until then the op is scaled_masked_softmax, with the scores in memory",
            )
            own: Any = super()
            return own.forward(query, key, value, attention_mask, attn_mask_type)
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        causal, window, mask = self._masked(kind.name, query, key, attention_mask)
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if self.softmax_offset is None:
            out: Tensor = ops.attention(q, k, v, mask, self.scale, causal=causal, window=window)
        else:
            out, lse = ops.attention(q, k, v, mask, self.scale, causal=causal, window=window, return_lse=True)
            out = with_sinks(out, lse, self.softmax_offset)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def _masked(
        self, kind: str, query: Tensor, key: Tensor, mask: Tensor | None
    ) -> tuple[bool | str, tuple[int, int] | None, Tensor | None]:
        """Return causal, window and mask of the op, with the meaning of :class:`FusedScaleMaskSoftmax`."""
        sq, sk = query.shape[0], key.shape[0]
        if self.window_size is not None:
            left, right = self.window_size
            if left >= 0 and right == 0:
                return "lower_right", (left, 0), mask
            return False, None, union(mask, get_sliding_window_causal_mask(sq, sk, (left, right), query.device))
        if kind == "causal_bottom_right":
            return "lower_right", None, mask
        if kind not in _CAUSAL or sq == 1:  # a single query is the last one in decoding: no key is masked
            return False, None, mask
        if sq != sk and mask is None:
            raise not_square(sq, sk)
        return sq == sk, None, mask
