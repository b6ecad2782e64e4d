"""The running maximum and sum of exponentials of rows of logits, of the losses (Milakov and Gimelshein 2018, "Online
normalizer calculation for softmax").

Each GROUP consecutive columns of a block have a maximum and a sum of their own, which the program adds up at the end of
the row. With as many columns as a thread reads by one access, no thread waits for another before that.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

import triton
import triton.language as tl

from fusedops_triton._common import exp


@triton.jit
def added(top, total, sums, z, finite, SMOOTH: tl.constexpr, GROUP: tl.constexpr):
    """Return the maxima, the sums of ``exp(z - top)`` and those of z with one more block of columns.

    top, total, sums: (rows, BLOCK // GROUP). z: (rows, BLOCK), -inf where there is no column. finite: the same, 0
    there; added to ``sums`` if SMOOTH.
    """
    shape: tl.constexpr = [z.shape[0], z.shape[1] // GROUP, GROUP]
    if SMOOTH:
        sums += tl.sum(tl.reshape(finite, shape), axis=2)
    z = tl.reshape(z, shape)
    higher = tl.maximum(top, tl.max(z, axis=2))
    # 0 if all logits so far are -inf, so that exp gives 0 and not exp(-inf + inf) = NaN. The sum is rescaled when the
    # maximum changes
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, total * exp(top - shift) + tl.sum(exp(z - shift[:, :, None]), axis=2), sums
