"""bias_gelu in plain torch: for now the op's reference."""

from fusedops import kernel, ops
from fusedops._op import OPS

_OP = OPS["bias_gelu"]


@kernel(ops.bias_gelu)
def bias_gelu(x, bias=None, *, approximate="tanh"):
    return _OP.reference(x, bias, approximate=approximate).contiguous()


@kernel(ops.bias_gelu, direction="backward")
def bias_gelu_backward(grad, x, bias, approximate, needs):
    return _OP.backward(grad, x, bias, approximate, needs)
