"""The private names of torch that this backend uses. Each was seen in torch 2.10.0 to 2.15.0.

torch.softmax and torch.log_softmax change the dtype under autocast, these functions do not; and log_softmax has no
``out``. ATen has had them with these arguments since 1.11. With ``out`` equal to the input they give the same bits
(tests/backends/eager/test_eager_softmax.py).
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import torch

softmax = torch._softmax
softmax_backward = torch._softmax_backward_data
log_softmax = torch._log_softmax
