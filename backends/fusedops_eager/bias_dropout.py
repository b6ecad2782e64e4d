"""bias_dropout in plain torch: for now the op's reference."""

from fusedops import kernel, ops
from fusedops._op import OPS

_OP = OPS["bias_dropout"]


@kernel(ops.bias_dropout)
def bias_dropout(x, bias=None, p=0.5, *, training=True, seed=None):
    return _OP.reference(x, bias, p, training=training, seed=seed).contiguous()


@kernel(ops.bias_dropout, direction="backward")
def bias_dropout_backward(grad, seed, bias, p, training, x_dtype, needs):
    return _OP.backward(grad, seed, bias, p, training, x_dtype, needs)
