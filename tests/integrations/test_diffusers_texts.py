"""Every text of the integration of diffusers, word for word."""

import torch
from error_calls import INVALID
from error_texts import Table

from fusedops.integrations.diffusers import apply

TABLE = Table(__file__)
pin = TABLE.pin

pin("a name", lambda: apply("flux"), INVALID)
pin("another op", lambda: apply(torch.nn.LayerNorm(4), ops=["attenton"]), INVALID)
pin("a text of ops", lambda: apply(torch.nn.LayerNorm(4), ops="attention"), INVALID)

test_a_text, test_no_text_is_left_over = TABLE.tests()
