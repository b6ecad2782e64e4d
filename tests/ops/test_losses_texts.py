"""Every text of fusedops.losses, word for word."""

from typing import Any

import torch
from error_calls import INVALID
from error_texts import Table

from fusedops.losses import dpo_loss, grpo_loss, kl_divergence

TABLE = Table(__file__)
pin = TABLE.pin

PAIR = torch.zeros(2)
TOKENS = torch.zeros(2, 3)


def pairs(**changes: Any) -> Any:
    return lambda: dpo_loss(**{"chosen": PAIR, "rejected": PAIR, **changes})


def sampled(**changes: Any) -> Any:
    return lambda: grpo_loss(**{"logp": TOKENS, "advantages": PAIR, "mask": TOKENS, **changes})


def heads(**changes: Any) -> Any:
    return lambda: kl_divergence(**{**dict.fromkeys(("x", "weight", "teacher_x", "teacher_weight"), TOKENS), **changes})


pin("a type", pairs(loss_type="dpo"), INVALID)
pin("no tensor", pairs(rejected=1.0), INVALID)
pin("a shape", pairs(rejected=TOKENS), INVALID)
pin("a missing length", pairs(loss_type="ipo"), INVALID)
pin("a number", pairs(beta=0.0), INVALID)
pin("smoothing", pairs(loss_type="hinge", label_smoothing=0.1), INVALID)
pin("a level", sampled(loss_type="sapo", importance_sampling_level="sequence"), INVALID)
pin("one dim", sampled(logp=PAIR), INVALID)
pin("a weight of both", heads(beta=2.0), INVALID)

test_a_text, test_no_text_is_left_over = TABLE.tests()
