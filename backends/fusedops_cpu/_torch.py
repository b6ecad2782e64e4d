"""The private name of torch that this backend uses. It was seen in torch 2.10.0 to 2.15.0."""

from collections.abc import Callable
from typing import Any

import torch


def empty_strided_cpu() -> Callable[..., torch.Tensor]:
    """Return the function by which compiled models allocate on a CPU: 0.4 us instead of torch.empty_strided's 0.8.

    Raises:
        AttributeError: this torch has none.
    """
    torch_c: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    return torch_c._dynamo.guards._empty_strided_cpu
