"""What the tests of the kernels in Triton's interpreter share: which of them it can run, and seeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton

_VERSIONS = [tuple(int(part) for part in version.split(".")[:2]) for version in (triton.__version__, np.__version__)]
#: Of tests that run kernels with a loop.
needs_loops = pytest.mark.skipif(
    _VERSIONS[0] < (3, 7) and _VERSIONS[1] >= (2, 4),
    reason="Triton's interpreter cannot loop with NumPy 2.4 before Triton 3.7 (triton-lang/triton#9171)",
)


def seed_of(number: int) -> torch.Tensor:
    return torch.tensor([number])
