"""Weights whose codes are packed along K or N of (K, N), turned to rows: GPTQ and AWQ, and the zeros of words."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.quantization._scaled import in_pairs

_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of 8 outputs
_ROWS = 64  # words that are taken apart at a time


def codes_of_words(words: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Return the 8 codes of each word as bytes, in a new last dim: that of bits ``4 * order[i]``, lowest bits first."""
    shifts = torch.tensor([4 * each for each in order], dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).to(torch.uint8)


def zeros_of_words(zeros: Tensor, outputs: int) -> Tensor:
    """Return zeros (..., N / 8, G) of words as bytes (..., N, G)."""
    return codes_of_words(zeros).movedim(-1, -2).flatten(-3, -2)[..., :outputs, :].contiguous()


def to_rows(
    format: str, codes: Tensor, scales: Tensor, zeros: Tensor, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (N, K / 2), scales (N, G) and zeros (N, G) of GPTQ or AWQ, by row, as INT4_GROUP has them."""
    outputs, columns = shape
    rows = codes.new_empty((outputs, columns // 2), dtype=torch.uint8)
    order = _AWQ if format == "AWQ" else tuple(range(8))
    if format == "AWQ":  # a word has 8 outputs of one column
        for first in range(0, codes.shape[1], _ROWS):
            part = codes_of_words(codes[:, first : first + _ROWS].t().contiguous(), order).movedim(-1, 1).flatten(0, 1)
            at = slice(8 * first, min(8 * first + part.shape[0], outputs))
            rows[at] = in_pairs(part[: at.stop - at.start])
    else:  # a word has 8 columns of one output
        rows.copy_(codes.t().contiguous().view(torch.uint8))
    of_zeros = codes_of_words(zeros, order).flatten(-2)[:, :outputs]
    if format == "GPTQ":  # which stores the code before
        of_zeros = of_zeros + 1
    return rows, scales.detach().t().contiguous(), of_zeros.t().contiguous()
