"""Every text of the integration of transformers, word for word."""

from typing import Any

import pytest
import torch
from error_calls import INVALID
from error_texts import Table
from torch import nn

from fusedops import FusedOpsWarning
from fusedops.integrations.transformers import apply, attention_forward

TABLE = Table(__file__)
pin = TABLE.pin


def attention(is_causal: bool = True, **options: Any) -> Any:
    q = torch.zeros(1, 2, 4, 8)
    return attention_forward(nn.Identity(), q, q, q, None, is_causal=is_causal, **options)


pin("an op", lambda: apply(nn.Identity(), ops=["gelu"]), INVALID, "got op in ops 'gelu'", "rms_norm", "write 'geglu'")
pin(
    "a misspelt op", lambda: apply(nn.Identity(), ops=["rmsnorm"]), INVALID, "'rmsnorm'", "rms_norm", "write 'rms_norm'"
)
pin("one op", lambda: apply(nn.Identity(), ops="rms_norm"), INVALID, "ops = 'rms_norm'", "a list", "ops=['rms_norm']")
pin("a name", lambda: apply("gpt2"), INVALID, "model = 'gpt2'", "torch.nn.Module", "from_pretrained")  # type: ignore[arg-type]
pin("a paged cache", lambda: attention(cache=object()), INVALID, "got a paged cache", "tensors", '"sdpa"')
pin("sparse", lambda: attention(indices=torch.zeros(1)), INVALID, "indices", "tensors", '"sdpa"')
pin("a window", lambda: attention(False, sliding_window=2), INVALID, "without a mask", "expected a mask", "pass")
pin("dropout", lambda: attention(dropout=0.1), FusedOpsWarning, "dropout = 0.1", "takes", "in the model's config")
pin("softcap", lambda: attention(softcap=30.0), FusedOpsWarning, "softcap = 30", "takes", "fusedops_softmax")
pin(
    "nothing", lambda: apply(nn.Identity()), FusedOpsWarning, "fusedops in Identity", "nothing is replaced", "no module"
)


@pytest.mark.parametrize("name", TABLE.pins)
def test_a_text(name: str) -> None:
    TABLE.check(name)


def test_no_text_is_left_over() -> None:
    TABLE.check_complete()
