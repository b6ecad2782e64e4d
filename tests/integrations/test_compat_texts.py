"""Every text of the drop-ins for Megatron, word for word."""

from typing import Any

import torch
from error_calls import INVALID, X
from error_texts import Table

TABLE = Table(__file__, "fakes")
pin = TABLE.pin


def megatron(name: str, *args: Any, **kwargs: Any) -> Any:
    from fusedops.compat import megatron

    return getattr(megatron, name)(*args, **kwargs)


def mask_type() -> None:
    megatron("FusedScaleMaskSoftmax", False, False, "casual", True, None, False, None)(torch.ones(1, 1, 2, 2), None)


def window_and_mask() -> None:
    module = megatron("FusedScaleMaskSoftmax", False, False, "causal", True, None, False, None, window_size=(1, 0))
    module(torch.ones(1, 1, 2, 2), torch.ones(2, 2))


pin("mask type", mask_type, INVALID)
pin("an additive mask joined", window_and_mask, INVALID)
pin("SoftmaxOne's dim", lambda: megatron("SoftmaxOne", 1), INVALID)
pin("SoftmaxOne's sink", lambda: megatron("SoftmaxOne")(X), INVALID)

test_a_text, test_no_text_is_left_over = TABLE.tests()
