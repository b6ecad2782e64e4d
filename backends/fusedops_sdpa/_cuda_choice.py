"""Which of torch's three kernels of attention for CUDA computes a call.

``cudnn`` where scaled_dot_product_attention takes it (torch 2.11: compute capabilities 9 and 10, cuDNN after 9.15), and
so not where ``enable_cudnn_sdp(False)`` or ``sdpa_kernel`` exclude it, but for:

- Small calls. cuDNN prepares a plan for each new combination of sizes and strides, forward and backward: 0.4 s each on
  an H200 with cuDNN 9.19, which no number of such calls gains again. A step of decoding has a new size each time.
- One query. The forward of cuDNN 9.19 to 9.25 is wrong there on compute capability 10 (pytorch#193893), and a backward
  has NaN on 9 (cudnn-frontend#1072) or ends the process (cudnn-frontend#1071).
- A backward on compute capability 9 with 64 keys more than a multiple of 128: the weights of the 64 keys after the last
  are ``exp(0 - lse)``, unless a causal mask hides them, and dq is NaN where a row's lse is below -88 (pytorch#196678).
- Deterministic algorithms.

What remains is for ``flash``, without a mask in 16 bits, and ``efficient``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from fusedops import TensorSpec
from fusedops_sdpa import _torch

BITS_16 = torch.float16, torch.bfloat16
#: Of q and k, and of v, beyond 128: what cuDNN has both directions for.
_LARGE_HEADS = (192, 128), (256, 256)
_CUDNN = torch.nn.attention.SDPBackend.CUDNN_ATTENTION.value
#: Products of a call, each of two numbers. On an H200 flash's forward took 10 us for a fifth of them, 40 for twice.
LEAST_WORK = 2**31


def kernel_of(q: Any, k: Any, v: Any, mask: Any, causal: str, backward: bool) -> str:
    """Return "cudnn", "flash" or "efficient" for a call, of tensors or specs."""
    if _takes_cudnn(q, k, v, mask, causal, backward):
        return "cudnn"
    return "flash" if _takes_flash(q, k, v, mask, causal) else "efficient"


def seen_keys(q: Any, k: Any, causal: str) -> int:
    """Return how many keys some query sees, by a causal mask at the upper left or none."""
    return k.shape[2] if causal == "none" else min(q.shape[2], k.shape[2])


def _takes_cudnn(q: Any, k: Any, v: Any, mask: Any, causal: str, backward: bool) -> bool:
    batch, heads, queries, size = q.shape
    width, keys = v.shape[3], seen_keys(q, k, causal)
    if q.dtype not in BITS_16 or queries == 1 or keys == 1:
        return False
    if batch * heads * queries * keys * (size + width) < LEAST_WORK:
        return False
    if max(size, width) > 128 and (size, width) not in _LARGE_HEADS:
        return False
    if backward and keys % 128 == 64 and _capability(q)[0] == 9:
        hides_the_keys_after = causal != "none" and queries <= keys and mask is None
        if not hides_the_keys_after:
            return False
    return _is_torchs_choice(q, k, v, causal)


def _is_torchs_choice(q: Any, k: Any, v: Any, causal: str) -> bool:
    """Return True where scaled_dot_product_attention takes cuDNN. Asked in each call, 1 us: settings may change.

    Of a spec: where it does unless a setting forbids it.
    """
    if isinstance(q, TensorSpec):
        return _capability(q)[0] in (9, 10)
    if _torch.sdp_choice is None or not _torch.cudnn_is_enabled() or torch.are_deterministic_algorithms_enabled():
        return False
    grouped = q.shape[1] != k.shape[1]
    try:
        return _torch.sdp_choice(q, k, v, None, 0.0, causal != "none", enable_gqa=grouped) == _CUDNN
    except RuntimeError:  # none of the enabled kernels takes the call
        return False


def _takes_flash(q: Any, k: Any, v: Any, mask: Any, causal: str) -> bool:
    """Return True where the flash kernel takes a call, forward and backward."""
    size = q.shape[3]
    if mask is not None or q.dtype not in BITS_16 or v.shape[3] != size or size > 256:
        return False
    if 192 < size <= 224:  # no backward on compute capability 8.6, 8.9 and 12
        return False
    return (causal == "none" or q.shape[2] <= k.shape[2]) and _capability(q) >= (8, 0)


def _capability(q: Any) -> tuple[int, int]:
    if isinstance(q, TensorSpec):
        return q.capability or (8, 0)
    return capability_of(q.device)


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)
