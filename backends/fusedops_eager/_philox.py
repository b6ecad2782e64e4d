"""The keep-mask of dropout on a CPU: Philox4x32-10 in blocks, the same bits as ``fusedops.ops._philox``.

All is int64, which ATen multiplies element by element where AVX2 is the best there is: 0.6 ns, other passes 0.2, Zen 3,
1 thread. It beats 16 passes of int32 that would make the high word by halves (1.2 times as long), and uint64, which
torch does not vectorise (4 times). A counter, for four elements, takes 30 ns, and half of it the multiplications.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.ops._philox import threshold

_LOW = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_STEP0, _STEP1 = 0x9E3779B9, 0xBB67AE85
_SIGN = 0x80000000


class Keep:
    """Which elements dropout keeps, a stretch of linear indices at a time; its buffers serve every stretch.

    Args:
        seed: 64 bits, signed or unsigned.
        p: probability of dropping, at most 1 - 2**-33.
        stretch: the most elements that a call asks for. The buffers take ``BYTES`` for each.
    """

    BYTES = 14

    def __init__(self, seed: int, p: float, stretch: int) -> None:
        self.bound = threshold(p) - _SIGN
        self.keys = [((seed + i * _STEP0) & _LOW, ((seed >> 32) + i * _STEP1) & _LOW) for i in range(10)]
        # the rows of the state are (c2, c0), so the second word of the key comes first
        columns = torch.tensor([[[k1], [k0]] for k0, k1 in self.keys], device="cpu")
        columns[9] ^= _SIGN
        self.columns = columns[3:].unbind()
        # a number given as a tensor spares each call the 1 us of making one
        self.numbers = torch.tensor([32, _LOW, _M0, _M1], device="cpu").unbind()
        counters = stretch // 4 + 2  # a stretch begins and ends anywhere
        self.steps = torch.arange(counters, device="cpu").mul_(_M0)
        self.store = torch.empty(6 * counters, dtype=torch.int64, device="cpu")

    def __call__(self, start: int, count: int) -> Tensor:
        """1 where the element is kept, else 0: (count,), int32, for the indices from ``start`` on.

        It is a buffer: the next call writes it again.
        """
        first, skip = divmod(start, 4)
        return self.words(first, (skip + count + 3) // 4).ge_(self.bound)[skip : skip + count]

    def words(self, first: int, count: int) -> Tensor:
        """The words of ``count`` counters from ``first`` on, in order, less 2**31: (4 * count,), int32.

        Less 2**31, because torch compares signed numbers. A buffer, as above.
        """
        high, low = first >> 32, first & _LOW
        if low + count > 2**32:  # the counter's second word is to be one number: once in 2**34 elements
            split = 2**32 - low
            return torch.cat((self.words(first, split).clone(), self.words(first + split, count - split)))
        mul, shift, xor, keys = torch.mul, torch.bitwise_right_shift, torch.bitwise_xor, self.keys
        half, mask, m0, m1 = self.numbers
        # p and q: 64-bit products of this round and the last one, rows (of c0, of c2); t: the new (c2, c0). A low half
        # is never taken out: the "and" after the xor cleans it, and does so for the sign that the shift drags in.
        p, q, t = self.store[: 6 * count].view(3, 2, count).unbind()
        (p0, p1), (q0, q1), (t0, t1) = p.unbind(), q.unbind(), t.unbind()
        # Rounds 1 and 2 are one: c1 is one number, c2 and c3 are 0, so c0 is a number after round 1; and the product of
        # consecutive counters is a table plus a number.
        c0 = high ^ keys[0][0]
        product = _M0 * c0
        torch.add(self.steps[:count], _signed(_M0 * low), out=q0)
        shift(q0, half, out=t0)
        t0.bitwise_xor_(keys[0][1]).bitwise_and_(mask)
        mul(t0, m1, out=q1)
        shift(q1, half, out=t1)
        t1.bitwise_xor_(keys[1][0])
        xor(q0, (product >> 32) ^ keys[1][1], out=t0)
        t.bitwise_and_(mask)
        # Round 3: c3 is still a number
        mul(t1, m0, out=p0)
        mul(t0, m1, out=p1)
        shift(p, half, out=t)
        t0.bitwise_xor_((product & _LOW) ^ keys[2][1])
        t1.bitwise_xor_(q1).bitwise_xor_(keys[2][0])
        for column in self.columns:
            t.bitwise_and_(mask)
            p, p0, p1, q, q0, q1 = q, q0, q1, p, p0, p1
            mul(t1, m0, out=p0)
            mul(t0, m1, out=p1)
            shift(p, half, out=t)
            t.bitwise_xor_(q).bitwise_xor_(column)
        t.bitwise_and_(mask)
        p.bitwise_left_shift_(half).bitwise_xor_(-(2**63))
        words = q.view(count, 2)  # q has done its service
        xor(t1, p1, out=words[:, 0])  # c0 and c1
        xor(t0, p0, out=words[:, 1])  # c2 and c3
        return words.view(-1).view(torch.int32)


def _signed(value: int) -> int:
    """The int64 with the lowest 64 bits of ``value``."""
    return (value + 2**63) % 2**64 - 2**63
