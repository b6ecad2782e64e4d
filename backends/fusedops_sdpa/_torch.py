"""The private names of torch that this backend uses. Each was seen in torch 2.10.0 to 2.15.0."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import torch

# of torch itself: by torch.ops the same call takes 2 us more (a busy AMD EPYC, 1 thread)
flash_attention_for_cpu = torch._scaled_dot_product_flash_attention_for_cpu
flash_attention_for_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention.default
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention.default
efficient_attention_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
