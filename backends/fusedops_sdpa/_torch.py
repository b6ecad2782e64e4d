"""The private names of torch that this backend uses. Each was seen in torch 2.10.0 to 2.15.0."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from collections.abc import Callable
from typing import Any

import torch

_c: Any = torch._C

# of torch itself: by torch.ops the same call takes 2 us more (a busy AMD EPYC, 1 thread)
flash_attention_for_cpu = torch._scaled_dot_product_flash_attention_for_cpu
flash_attention_for_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention.default
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
flash_of_sequences = torch.ops.aten._flash_attention_forward.default
flash_of_sequences_backward = torch.ops.aten._flash_attention_backward.default
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention.default
efficient_attention_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention.default
cudnn_attention_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
#: The kernel that scaled_dot_product_attention takes for a call, as a value of torch.nn.attention.SDPBackend. It raises
#: where the enabled ones take none. None in a torch without it.
sdp_choice: Callable[..., int] | None = getattr(torch, "_fused_sdp_choice", None)
#: True where torch.backends.cuda.enable_cudnn_sdp and torch.nn.attention.sdpa_kernel leave cuDNN enabled.
cudnn_is_enabled: Callable[[], bool] = getattr(_c, "_get_cudnn_sdp_enabled", lambda: False)
