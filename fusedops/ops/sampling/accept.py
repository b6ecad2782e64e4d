"""accept: the test of a drafted token in speculative decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.ops.sampling.arguments import of_rows
from fusedops.philox import philox


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
