"""Parts of the kernels of the losses: softcaps, and the running maximum and sum of exponentials of rows of logits.

Milakov and Gimelshein 2018, "Online normalizer calculation for softmax". Here each GROUP consecutive columns of a block
have a maximum and a sum of their own, which the program adds up at the end of the row. With as many columns as a thread
reads by one access, no thread waits for another before that.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

import triton
import triton.language as tl

from fusedops_triton._jit._common import exp, reciprocal, scalar, widened


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


@triton.jit
def read_logits(line, bias_ptr, col, reach, softcap, CAPS: tl.constexpr, MASKED: tl.constexpr):
    """Return the logits of some columns with the bias, capped: ``softcap * tanh(z / softcap)``."""
    z = widened(tl.load(line + col, mask=reach, other=0.0) if MASKED else tl.load(line + col))
    if bias_ptr is not None:
        z += widened(tl.load(bias_ptr + col, mask=reach, other=0.0) if MASKED else tl.load(bias_ptr + col))
    if CAPS:
        z = capped(z, softcap)
    return z


@triton.jit
def capped(x, softcap):
    """Return ``softcap * tanh(x / softcap)``. softcap: see ``scalar``."""
    cap = scalar(softcap)
    return cap * _tanh(x / cap)


@triton.jit
def slope(z, softcap):
    """Return the derivative of ``capped`` from its result."""
    ratio = z / scalar(softcap)
    return 1.0 - ratio * ratio


@triton.jit
def _tanh(u):
    """Return tanh(u), with a small relative error for small u too, where ``1 - exp(-2u)`` cancels."""
    size = tl.abs(u)
    e = exp(-2.0 * size)  # at most 1: does not overflow
    far = (1.0 - e) * reciprocal(1.0 + e)
    s = size * size
    near = size * (1.0 + s * (-0.33333334 + s * (0.13333334 + s * (-0.053968254 + s * 0.021869488))))
    positive = tl.where(size < 0.2, near, far)
    return tl.where(u < 0.0, -positive, positive)
