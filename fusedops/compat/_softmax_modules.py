"""Megatron's and apex's softmax modules over :func:`fusedops.scaled_masked_softmax`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops import ops
from fusedops.compat._masks import (
    AttnMaskType,
    attention_mask_func,
    get_default_causal_mask,
    get_sliding_window_causal_mask,
    is_causal,
)
from fusedops.compat._softmax import not_square
from fusedops.errors import InvalidInputError


def _joined(mask: Tensor | None, other: Tensor) -> Tensor:
    """What either masks. An additive mask is refused: ``bool()`` would take it for another."""
    if mask is None:
        return other
    if mask.dtype not in (torch.bool, torch.uint8):
        raise InvalidInputError(
            f"mask is {mask.dtype}; needs bool or uint8, True where masked out; convert it, as in mask < 0"
        )
    return mask.bool() | other


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _with_sink(x: Tensor, mask: Tensor | None, scale: float, causal: bool, sink: Tensor, backend: str | None) -> Tensor:
    """The softmax with one more logit in each row, the sink, whose own probability is dropped.

    Args:
        x: (b, np, sq, sk), any floating dtype.
        mask: as the op takes it, or None.
        scale: of ``x``, not of the sink.
        causal: as the op takes it.
        sink: (np,) or (1,), any floating dtype.
        backend: as the op takes it.

    Returns:
        (b, np, sq, sk), float32, or float64 for float64. Rows sum to less than 1; one that is masked in full is 0.
    """
    b, np, sq, sk = x.shape
    if causal:
        mask = _joined(mask, get_default_causal_mask(sq, x.device))
    wide = _wide(x) * scale
    joined = torch.cat([wide, sink.to(wide).reshape(1, -1, 1, 1).expand(b, np, sq, 1)], dim=-1)
    if mask is not None:
        seen = torch.zeros(sk + 1, dtype=torch.bool, device=x.device)
        mask = _joined(mask.expand(*mask.shape[:-1], sk), seen[:-1])
        mask = torch.cat([mask, seen[-1:].expand(*mask.shape[:-1], 1)], dim=-1)
    return ops.scaled_masked_softmax(joined, mask, backend=backend)[..., :-1]


class SoftmaxOne(torch.nn.Module):
    """Softmax with a sink: one more logit for each head takes part, and its probability is dropped.

    A sink of 0 adds 1 to the denominator (https://www.evanmiller.org/attention-is-off-by-one.html).

    Args:
        dim: -1, 3 or None, which all mean the last dimension.
        denominator_offset: (np,), the sink's logit for each head; or (1,), one for all.

    Raises:
        InvalidInputError: ``dim`` is another; or, when called, the offset is no tensor. The original ignores the one
            and fails with AttributeError on the other, its own default included.
    """

    def __init__(self, dim: int | None = None, denominator_offset: Tensor | float = 1.0) -> None:
        super().__init__()
        if dim not in (None, -1, 3):
            raise InvalidInputError(
                f"SoftmaxOne: dim is {dim}; needs -1, the last of (b, np, sq, sk); transpose x before, and leave "
                f"dim out"
            )
        self.dim = dim
        self.denominator_offset = denominator_offset

    def forward(self, x: Tensor) -> Tensor:
        """Probabilities of ``x`` (b, np, sq, sk), as ``x`` in shape and dtype."""
        if not isinstance(self.denominator_offset, Tensor):
            raise InvalidInputError(
                f"SoftmaxOne: denominator_offset is {self.denominator_offset!r}; needs a tensor of logits, one for "
                f"each head; torch.zeros(heads) adds 1 to the denominator"
            )
        return _with_sink(x, None, 1.0, False, self.denominator_offset, None).to(x.dtype)


class FusedScaleMaskSoftmax(torch.nn.Module):
    """Megatron's attention softmax: scale, mask, softmax, on any shape, dtype and device.

    Args:
        input_in_fp16: the input is float16.
        input_in_bf16: the input is bfloat16.
        attn_mask_type: ``AttnMaskType.causal`` makes a causal mask; any other leaves all to the mask given. A member of
            Megatron's or apex's own enum, or its name, does as well.
        scaled_masked_softmax_fusion: True takes the backend of the policy, False the eager one.
        mask_func: None or a function called ``attention_mask_func`` stand for masking, which is then exact. Any other
            is called with the scaled scores in float32 and the mask, and its result goes into the softmax.
        softmax_in_fp32: sets the output's dtype along with the first two: then it is float16 or bfloat16 as they say.
            Otherwise it is the input's. The arithmetic is in float32 always.
        scale: a number, or None for 1.
        window_size: (left, right): how many keys before and after its own a query sees, -1 for all; takes the place of
            the causal mask. None: no window.

    Raises:
        AssertionError: both dtypes are set; or there is a scale without softmax_in_fp32.
        InvalidInputError: ``attn_mask_type`` is a name that no mask type has.

    Source: Megatron-LM, ``megatron/core/fusions/fused_softmax.py``.
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
        # raised, not asserted: the errors are the original's, and python -O keeps them
        if input_in_fp16 and input_in_bf16:
            raise AssertionError("input_in_fp16 and input_in_bf16 are both set; needs one at most")
        if scale is not None and not softmax_in_fp32:
            raise AssertionError(f"scale is {scale} and softmax_in_fp32 is not set; needs it with a scale")
        self.input_in_fp16 = input_in_fp16
        self.input_in_bf16 = input_in_bf16
        self.input_in_float16 = input_in_fp16 or input_in_bf16
        self.attn_mask_type = attn_mask_type
        self.scaled_masked_softmax_fusion = scaled_masked_softmax_fusion
        self.mask_func = mask_func
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = scale
        self.window_size = window_size
        is_causal(attn_mask_type)  # a misspelt name is seen here

    def forward(self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None) -> Tensor:
        """The attention probabilities.

        Args:
            input: (b, np, sq, sk), float16, bfloat16, float32 or float64. Never written.
            mask: bool or uint8, broadcastable to ``input``, True where masked out; or None. A mask is never dropped:
                it masks along with the window, and along with the causal mask where sq == sk.
            softmax_offset: (np,), a sink's logit for each head, see :class:`SoftmaxOne`; or None.

        Returns:
            (b, np, sq, sk), dtype as the class says. A row that is masked in full is exactly 0.

        Raises:
            AssertionError: ``input`` is not 4-D; or the type is causal, sq > 1, sq != sk, and there is no mask.
            InvalidInputError: the op does not take the arguments.
        """
        if input.dim() != 4:
            raise AssertionError(f"input has {input.dim()} dimensions; needs (b, np, sq, sk)")
        b, np, sq, sk = input.shape
        if not self.is_kernel_available(mask, b, np, sq, sk):
            return self.forward_torch_softmax(input, mask, softmax_offset)
        if softmax_offset is None:
            return self.forward_fused_softmax(input, mask)
        return self._probabilities(input, mask, softmax_offset, None)

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Whether forward takes the backend of the policy: always, where fusion is wanted. No size is refused."""
        return bool(self.scaled_masked_softmax_fusion)

    def forward_fused_softmax(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """As forward, by the backend of the policy."""
        return self._probabilities(input, mask, None, None)

    def forward_torch_softmax(self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None) -> Tensor:
        """As forward, by the eager backend."""
        return self._probabilities(input, mask, softmax_offset, "eager")

    @staticmethod
    def get_batch_per_block(sq: int, sk: int, b: int, np: int) -> int:
        """How many rows one block of the original's CUDA kernel takes; nothing here needs it."""
        width = 1 << max(sk - 1, 0).bit_length()  # the next power of two
        return 128 // min(width, 32) * (2 if width <= 128 else 1)

    def extra_repr(self) -> str:
        """The settings that tell modules apart."""
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
            input = _wide(input)
        if mask is not None and self.mask_func is not None and not _masks_out(self.mask_func):
            # a new tensor, as mask_func may write it
            input = self.mask_func(_wide(input) * scale, mask)
            scale, mask, given = 1.0, None, True
        else:
            given = mask is not None
        causal = False
        if self.window_size is not None:
            window = get_sliding_window_causal_mask(sq, sk, self.window_size, input.device)
            mask = _joined(mask, window)
        elif is_causal(self.attn_mask_type) and sq > 1:  # one query is a decoder's newest: it sees all keys
            causal = sq == sk
            if not causal and not given:
                raise not_square(sq, sk)
        if softmax_offset is not None:
            y = _with_sink(input, mask, scale, causal, softmax_offset, backend)
        else:
            y = ops.scaled_masked_softmax(input, mask, scale, causal=causal, backend=backend)
        return y.to(dtype)


class GenericFusedScaleMaskSoftmax(FusedScaleMaskSoftmax):
    """apex's form without limits on sizes, always of type padding; its parameters lack the mask type."""

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
    """Whether a mask function only marks what is masked out, as those of this name in Megatron and apex do."""
    return getattr(mask_func, "__name__", "") == attention_mask_func.__name__
