"""The noise of a token, the exponential, and the limit of top_p: all backends compute the same bits.

Each operation here is one rounding of IEEE 754 float32, or exact: nothing is fused, and no function of a library is
called. Sums of probabilities are of integers, in units of 2^-40, so that no order changes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.ops.sampling.arguments import of_rows
from fusedops.philox import philox

#: A probability of 1 in sums. Of 2^22 tokens, the largest vocabulary, the sum is less than 2^63.
UNIT = 2.0**40
LARGEST_VOCABULARY = 2**22
LOWEST_EXPONENT = -87.0  # of an exponential that is not 0
#: The factor 1 / temperature is between the smallest and the largest normal number.
SMALLEST_FACTOR, LARGEST_FACTOR = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max

LN_2 = (0.693359375, -2.12194440e-4)  # in two parts: the first has few bits
LOG2_E = 1.44269504
ROUNDS = 12582912.0  # 1.5 * 2^23: a sum with it is rounded to a whole number
SQRT_HALF_BITS = 0x3F3504F3
NEAR_ONE = 0.2928932  # 1 - sqrt(1/2)
# that of the highest degree first: log(1 + f) = f - f^2 / 2 + f^3 * LOG(f) for 1 + f in [sqrt(1/2), sqrt(2)], and
# exp(r) = 1 + r + r^2 * EXP(r) for r of at most ln(2) / 2. Cephes, logf.c and expf.c
LOG = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def accept(
    draft: Tensor, draft_log_prob: Tensor, log_prob: Tensor, seed: int | Tensor, position: int | Tensor
) -> Tensor:
    """Return True for each drafted token that speculative decoding keeps: with probability p / q, at most 1.

    The random number is a function of the seed, the position and the token, as that of :func:`fusedops.sample`, but of
    other counters of Philox (1 in their second word): it is independent of the noise that drew the token.

    Args:
        draft: (...), int64: the tokens, at least 0. Of a negative one, as of a row without a token, nothing is kept.
        draft_log_prob: (...), floating: log q, of the draft model, among the tokens that its filters keep.
        log_prob: (...), floating: log p, of the model, in the same way.
        seed: 64 bits, a number or (...), int64.
        position: at least 0, of the tokens in their sequences, a number or (...), int64.

    Returns:
        (...), bool. False where a log probability is NaN.

    Raises:
        InvalidInputError: a number is out of its range.

    Source: Leviathan et al. 2023, arXiv:2211.17192, algorithm 1.

    >>> import torch, fusedops
    >>> draft, q = torch.tensor([3, 3, 5]), torch.tensor([0.5, 0.5, 0.5]).log()
    >>> fusedops.accept(draft, q, torch.tensor([0.6, 0.1, 0.0]).log(), seed=7, position=torch.arange(3))
    tensor([ True, False, False])
    """
    seeds, positions = (
        of_rows("accept", name, value, draft[..., None]) for name, value in (("seed", seed), ("position", position))
    )
    words = torch.stack(philox((draft.clamp(min=0) >> 2) + 2**32, seeds, positions), -1)
    word = words.gather(-1, (draft & 3)[..., None])[..., 0]
    ratio = log_prob.float() - draft_log_prob.float()
    u = (word.float() + 0.5) * 2.0**-32  # it may be rounded to 1
    return ((u < ratio.exp()) | (ratio >= 0)) & (draft >= 0)


def exponential(d: Tensor) -> Tensor:
    """Return exp(d) of differences from the largest logit, float32, at most 0; 0 below LOWEST_EXPONENT."""
    c = d.clamp(min=LOWEST_EXPONENT)
    n = (c * LOG2_E + ROUNDS) - ROUNDS
    r = (c - n * LN_2[0]) - n * LN_2[1]
    e = _polynomial(r, EXP) * (r * r) + r + 1.0
    power = ((n.to(torch.int32) + 127) << 23).view(torch.float32)
    return (e * power).masked_fill(d < LOWEST_EXPONENT, 0.0)


def gumbel(seed: Tensor, position: Tensor, count: int) -> Tensor:
    """Return the Gumbel noise of each token: (..., count), float32, for a seed and a position of (...)."""
    counter = torch.arange((count + 3) // 4, device=seed.device, dtype=torch.int64)
    words = torch.stack(philox(counter, seed[..., None], position[..., None]), -1).flatten(-2)[..., :count]
    return noise_of(words)


def noise_of(words: Tensor) -> Tensor:
    """Return -log(-log(u)) of u = (word + 1/2) / 2^32. Of u above 1/2 the distance from 1 is rounded, not u."""
    near_one = words >= 2**31
    v = (torch.where(near_one, 2**32 - 1 - words, words).float() + 0.5) * 2.0**-32  # u, or 1 - u
    exponent, f = _split(v)
    small = v < NEAR_ONE
    exponent = torch.where(near_one, small.float() - 1.0, exponent)
    f = torch.where(near_one, torch.where(small, -v, 1.0 - 2.0 * v), f)
    return -_logarithm(*_split(-_logarithm(exponent, f)))


def needed_sum(p: Tensor, total: Tensor) -> Tensor:
    """Return the sum that the tokens of top_p reach, int64, of p in float32 and the sum of all."""
    return (p.double() * total.double()).ceil().long()


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e and f of x = 2^e * (1 + f), with 1 + f in [sqrt(1/2), sqrt(2)); x is a positive normal number."""
    bits = x.contiguous().view(torch.int32)
    e = (bits - SQRT_HALF_BITS) >> 23
    return e.float(), (bits - (e << 23)).view(torch.float32) - 1.0


def _logarithm(e: Tensor, f: Tensor) -> Tensor:
    """Return log(2^e * (1 + f))."""
    f2 = f * f
    y = f * f2 * _polynomial(f, LOG)
    y = y + e * LN_2[1]
    y = y - f2 * 0.5
    return (f + y) + e * LN_2[0]


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Return the polynomial by Horner's rule."""
    y = x * coefficients[0] + coefficients[1]
    for each in coefficients[2:]:
        y = y * x + each
    return y
