"""The softmax modules of Megatron and apex, with :func:`fusedops.scaled_masked_softmax`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops import ops
from fusedops.compat._masks import (
    AttnMaskType,
    attention_mask_func,
    get_sliding_window_causal_mask,
    is_causal,
)
from fusedops.compat._sink import softmax_with_sink, union
from fusedops.compat._softmax import not_square
from fusedops.dtypes import upcast


class FusedScaleMaskSoftmax(torch.nn.Module):
    """Megatron's attention softmax: scale, mask, softmax. Supports any size, floating dtype and device.

    Args:
        input_in_fp16: the input is float16.
        input_in_bf16: the input is bfloat16.
        attn_mask_type: ``AttnMaskType.causal`` adds a causal mask; with any other type only the mask argument is used.
            Members of Megatron's or apex's own enum and names of members are supported too.
        scaled_masked_softmax_fusion: True uses the backend that the policy selects, False the eager backend.
        mask_func: with None or a function named ``attention_mask_func``, masking is exact. Any other function is called
            with the scaled scores in float32 and the mask, and the softmax of its result is computed.
        softmax_in_fp32: if True and one of the first two is True, the output is float16 or bfloat16. Otherwise the
            output has the dtype of the input. The compute dtype is always float32 (float64 for float64).
        scale: a number, or None for 1.
        window_size: (left, right): the number of keys before and after its own position that a query attends to, -1 for
            all. The window replaces the causal mask. None: no window.

    Raises:
        AssertionError: both dtypes are set; or there is a scale without softmax_in_fp32.
        InvalidInputError: no mask type has the name ``attn_mask_type``.

    Source: Megatron-LM, ``megatron/core/fusions/fused_softmax.py``.

    >>> softmax = FusedScaleMaskSoftmax(False, False, AttnMaskType.causal, True, None, True, 0.5)
    >>> softmax(torch.zeros(1, 1, 2, 2), None)
    tensor([[[[1.0000, 0.0000],
              [0.5000, 0.5000]]]])
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: Any,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
        window_size: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        # The original uses assert. With raise, python -O keeps the errors.
        if input_in_fp16 and input_in_bf16:
            raise AssertionError(
                "got both input_in_fp16 and input_in_bf16, expected at most one; to fix: set one to False"
            )
        if scale is not None and not softmax_in_fp32:
            raise AssertionError(
                f"got scale {scale} and softmax_in_fp32=False, expected True with a scale; to fix: set it to True"
            )
        self.input_in_fp16 = input_in_fp16
        self.input_in_bf16 = input_in_bf16
        self.input_in_float16 = input_in_fp16 or input_in_bf16
        self.attn_mask_type = attn_mask_type
        self.scaled_masked_softmax_fusion = scaled_masked_softmax_fusion
        self.mask_func = mask_func
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = scale
        self.window_size = window_size
        is_causal(attn_mask_type)  # raises for an unknown name

    def forward(self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None) -> Tensor:
        """Compute the attention probabilities.

        Args:
            input: (b, np, sq, sk), float16, bfloat16, float32 or float64. It is not modified.
            mask: bool or uint8, broadcastable to ``input``, True where masked out; or None. A mask is never ignored: it
                applies in addition to the window, and in addition to the causal mask if sq == sk.
            softmax_offset: (np,), the logit of a sink for each head, see :class:`SoftmaxOne`; or None.

        Returns:
            (b, np, sq, sk); the class documents the dtype. A fully masked row is exactly 0.

        Raises:
            AssertionError: ``input`` is not 4-D; or the type is causal, sq > 1, sq != sk, and there is no mask.
            InvalidInputError: the arguments violate a constraint of the op.
        """
        if input.dim() != 4:
            raise AssertionError(
                f"input: got {input.dim()} dimensions, expected (b, np, sq, sk); to fix: view it with 4 dimensions"
            )
        b, np, sq, sk = input.shape
        if not self.is_kernel_available(mask, b, np, sq, sk):
            return self.forward_torch_softmax(input, mask, softmax_offset)
        if softmax_offset is None:
            return self.forward_fused_softmax(input, mask)
        return self._probabilities(input, mask, softmax_offset, None)

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Return True if forward uses the backend that the policy selects: if fusion is enabled, for any size."""
        return bool(self.scaled_masked_softmax_fusion)

    def forward_fused_softmax(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """Compute the probabilities with the backend that the policy selects."""
        return self._probabilities(input, mask, None, None)

    def forward_torch_softmax(self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None) -> Tensor:
        """Compute the probabilities with the eager backend."""
        return self._probabilities(input, mask, softmax_offset, "eager")

    @staticmethod
    def get_batch_per_block(sq: int, sk: int, b: int, np: int) -> int:
        """Return the number of rows per block of the original's CUDA kernel. For compatibility; it is not used here."""
        width = 1 << max(sk - 1, 0).bit_length()  # the next power of two
        return 128 // min(width, 32) * (2 if width <= 128 else 1)

    def extra_repr(self) -> str:
        """Return the settings for the module's repr."""
        kind = getattr(self.attn_mask_type, "name", self.attn_mask_type)
        window = "" if self.window_size is None else f", window_size={tuple(self.window_size)}"
        return f"attn_mask_type={kind}, scale={self.scale}, fusion={self.scaled_masked_softmax_fusion}{window}"

    def _probabilities(
        self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None, backend: str | None
    ) -> Tensor:
        sq, sk = input.shape[-2:]
        scale = 1.0 if self.scale is None else self.scale
        narrow = self.input_in_float16 and self.softmax_in_fp32
        dtype = input.dtype if not narrow else torch.float16 if self.input_in_fp16 else torch.bfloat16
        if dtype != input.dtype:
            input = upcast(input)
        if mask is not None and self.mask_func is not None and not _masks_out(self.mask_func):
            # the product is a new tensor, which mask_func may modify
            input = self.mask_func(upcast(input) * scale, mask)
            scale, mask, has_mask = 1.0, None, True
        else:
            has_mask = mask is not None
        causal = False
        if self.window_size is not None:
            window = get_sliding_window_causal_mask(sq, sk, self.window_size, input.device)
            mask = union(mask, window)
        elif is_causal(self.attn_mask_type) and sq > 1:  # a single query is the last one in decoding: no key is masked
            causal = sq == sk
            if not causal and not has_mask:
                raise not_square(sq, sk)
        if softmax_offset is not None:
            y = softmax_with_sink(input, mask, scale, causal, softmax_offset, backend)
        else:
            y = ops.scaled_masked_softmax(input, mask, scale, causal=causal, backend=backend)
        return y.to(dtype)


class GenericFusedScaleMaskSoftmax(FusedScaleMaskSoftmax):
    """apex's form for any size. The mask type is always padding, and is not a parameter.

    >>> softmax = GenericFusedScaleMaskSoftmax(False, False, True, None, True, None)
    >>> softmax(torch.zeros(1, 1, 1, 2), None)
    tensor([[[[0.5000, 0.5000]]]])
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__(
            input_in_fp16,
            input_in_bf16,
            AttnMaskType.padding,
            scaled_masked_softmax_fusion,
            mask_func,
            softmax_in_fp32,
            scale,
        )


def _masks_out(mask_func: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Return True if the function is ``attention_mask_func`` of Megatron, apex or this package, by its name."""
    return getattr(mask_func, "__name__", "") == attention_mask_func.__name__
