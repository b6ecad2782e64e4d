"""The keep-mask of dropout on a CPU: Philox4x32-10 in blocks, with the same bits as ``fusedops.philox``.

All arithmetic is int64. With AVX2, ATen multiplies int64 one element at a time: 0.6 ns per element; other operations
take 0.2 ns (Zen 3, 1 thread). This is still the fastest form: 16 int32 operations, which compute the high word from
halves, take 1.2 times as long, and uint64, which torch does not vectorise, 4 times. A counter, which covers four
elements, takes 30 ns; half of it is spent in the multiplications.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.philox import threshold

_LOW = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_STEP0, _STEP1 = 0x9E3779B9, 0xBB67AE85
_SIGN = 0x80000000


class KeepMask:
    """The keep-mask of dropout, computed for one range of linear indices per call. Calls reuse the buffers.

    Args:
        seed: 64 bits, signed or unsigned.
        p: probability of dropping, at most 1 - 2**-33.
        max_count: largest number of elements of a call. The buffers take ``BYTES`` bytes per element.
    """

    BYTES = 14

    def __init__(self, seed: int, p: float, max_count: int) -> None:
        self.bound = threshold(p) - _SIGN
        self.keys = [((seed + i * _STEP0) & _LOW, ((seed >> 32) + i * _STEP1) & _LOW) for i in range(10)]
        # the rows of the state are (c2, c0), so the second word of the key comes first
        round_keys = torch.tensor([[[k1], [k0]] for k0, k1 in self.keys], device="cpu")
        round_keys[9] ^= _SIGN
        self.round_keys = round_keys[3:].unbind()
        # constants as tensors: torch takes 1 us per call to convert a Python number
        self.constants = torch.tensor([32, _LOW, _M0, _M1], device="cpu").unbind()
        counters = max_count // 4 + 2  # + 2: a range can begin and end inside a group of four
        self.counter_products = torch.arange(counters, device="cpu").mul_(_M0)
        self.memory = torch.empty(6 * counters, dtype=torch.int64, device="cpu")

    def __call__(self, start: int, count: int) -> Tensor:
        """Return the mask of ``count`` elements from linear index ``start``: (count,), int32, 1 = kept, 0 = dropped.

        The result is a buffer. The next call overwrites it.
        """
        first, skip = divmod(start, 4)
        return self.words(first, (skip + count + 3) // 4).ge_(self.bound)[skip : skip + count]

    def words(self, first: int, count: int) -> Tensor:
        """Return the words of ``count`` counters from ``first``, in order, minus 2**31: (4 * count,), int32.

        2**31 is subtracted because torch compares signed numbers. The result is a buffer, as above.
        """
        high, low = first >> 32, first & _LOW
        if (
            low + count > 2**32
        ):  # the code below needs one second word for all counters; it changes every 2**34 elements
            split = 2**32 - low
            return torch.cat((self.words(first, split).clone(), self.words(first + split, count - split)))
        mul, shift, xor, keys = torch.mul, torch.bitwise_right_shift, torch.bitwise_xor, self.keys
        half, mask, m0, m1 = self.constants
        # p and q: 64-bit products of this round and of the previous one, rows (of c0, of c2); t: the new (c2, c0). The
        # low half is not extracted: the "and" after the xor clears the high half, and the sign bits of the shift too.
        p, q, t = self.memory[: 6 * count].view(3, 2, count).unbind()
        (p0, p1), (q0, q1), (t0, t1) = p.unbind(), q.unbind(), t.unbind()
        # Rounds 1 and 2 are merged: c1 is one number for all counters and c2 = c3 = 0, so c0 is one number after round
        # 1. The products of consecutive counters are a table plus a number.
        c0 = high ^ keys[0][0]
        product = _M0 * c0
        torch.add(self.counter_products[:count], _signed(_M0 * low), out=q0)
        shift(q0, half, out=t0)
        t0.bitwise_xor_(keys[0][1]).bitwise_and_(mask)
        mul(t0, m1, out=q1)
        shift(q1, half, out=t1)
        t1.bitwise_xor_(keys[1][0])
        xor(q0, (product >> 32) ^ keys[1][1], out=t0)
        t.bitwise_and_(mask)
        # Round 3: c3 is still one number for all counters
        mul(t1, m0, out=p0)
        mul(t0, m1, out=p1)
        shift(p, half, out=t)
        t0.bitwise_xor_((product & _LOW) ^ keys[2][1])
        t1.bitwise_xor_(q1).bitwise_xor_(keys[2][0])
        for round_key in self.round_keys:
            t.bitwise_and_(mask)
            p, p0, p1, q, q0, q1 = q, q0, q1, p, p0, p1
            mul(t1, m0, out=p0)
            mul(t0, m1, out=p1)
            shift(p, half, out=t)
            t.bitwise_xor_(q).bitwise_xor_(round_key)
        t.bitwise_and_(mask)
        p.bitwise_left_shift_(half).bitwise_xor_(-(2**63))
        words = q.view(count, 2)  # the values of q are no longer needed
        xor(t1, p1, out=words[:, 0])  # c0 and c1
        xor(t0, p0, out=words[:, 1])  # c2 and c3
        return words.view(-1).view(torch.int32)


def _signed(value: int) -> int:
    """Return the lowest 64 bits of ``value`` as a signed integer."""
    return (value + 2**63) % 2**64 - 2**63
