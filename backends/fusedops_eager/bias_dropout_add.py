"""bias_dropout_add in plain torch: for now the op's reference."""

from fusedops import kernel, ops
from fusedops._op import OPS

_OP = OPS["bias_dropout_add"]


@kernel(ops.bias_dropout_add)
def bias_dropout_add(x, bias, residual, p=0.5, *, training=True, seed=None):
    return _OP.reference(x, bias, residual, p, training=training, seed=seed).contiguous()


@kernel(ops.bias_dropout_add, direction="backward")
def bias_dropout_add_backward(grad, seed, bias, p, training, x_dtype, needs):
    return _OP.backward(grad, seed, bias, p, training, x_dtype, needs)
