"""sample in the compiled library (``src/elementwise/sample.cpp``)."""

from __future__ import annotations

import torch

from fusedops import ops
from fusedops.ops.sampling.arguments import LOG_PROBS, SampleArgs
from fusedops_cpu._constraints import any_dtype
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import LibraryCall


@library_kernel(
    ops.sample, *any_dtype("logits"), source="fusedops_cpu/src/elementwise/sample.cpp", rows_independent=True
)
def sample(a: SampleArgs) -> LibraryCall:
    """Draw a token for each row; logits of any rank and strides."""
    rows, columns = a.logits.shape[:-1], a.logits.shape[-1]
    token = a.logits.new_empty(rows, dtype=torch.int64)
    log_prob = a.logits.new_empty(rows, dtype=torch.float32)
    mask, mask_row = a.mask, 0
    if mask is not None:
        one = mask.shape[:-1].numel() == 1  # for all rows
        mask = mask.reshape(mask.shape[-1:]).expand(columns) if one else mask.expand(a.logits.shape)
        mask_row = 0 if one else columns
    of_rows = (a.temperature, a.top_p, a.min_p, a.top_k, a.seed, a.position, mask)
    fields = (
        dense(a.logits),
        *(None if each is None else dense(each) for each in of_rows),
        *(token, log_prob),
        *(DTYPE_CODES[a.logits.dtype], token.numel(), columns, mask_row, LOG_PROBS.index(a.return_log_prob)),
    )
    return LibraryCall(library().sample, fields, (token, log_prob))
