"""A plugin that brings an op of its own, ``my_square``, and a backend for it, ``mine``."""

SOURCE = '''
import fusedops, torch
from fusedops import Case, Tolerance
from fusedops.constraints import Finite, Floating
from torch import Tensor

ran = []


def my_square(x: Tensor, factor: float = 1.0, *, backend: str | None = None) -> Tensor:
    """Compute ``factor * x * x``."""
    return fusedops.call(OP, (x, factor), backend)


def reference(x: Tensor, factor: float) -> Tensor:
    return factor * x * x


def backward(grad: Tensor, x: Tensor, factor: float) -> Tensor:
    return 2 * factor * grad * x


TOLERANCE = {torch.float32: Tolerance(1e-6, 1e-6), torch.float64: Tolerance(1e-12, 1e-12)}
OP = fusedops.Op(
    my_square,
    constraints=[Floating("x"), Finite("factor")],
    reference=reference,
    backward=backward,
    differentiable=("x",),
    evidence=fusedops.Evidence(
        tolerance=TOLERANCE,
        gradient_tolerance=TOLERANCE,
        cases=[Case("small", {"x": (3, 4), "factor": 2.0})],
        min_bytes=lambda x, factor: {"forward": 2 * x.nbytes, "backward": 3 * x.nbytes},
        unfused=reference,
        formula="factor * x * x",
    ),
)


def kernels(name):
    @fusedops.kernel("my_square")
    def forward(x, factor):
        ran.append(name)
        return factor * x * x

    @fusedops.kernel("my_square", direction="backward")
    def backward(grad, x, factor):
        ran.append(f"{name} backward")
        return 2 * factor * grad * x

    return forward, backward


BACKEND = fusedops.Backend("mine", ("cpu",), -5, kernels("mine"))


@fusedops.hookimpl
def fusedops_op():
    return OP


@fusedops.hookimpl
def fusedops_backend():
    return BACKEND
'''

OP_ALONE = SOURCE.rpartition("@fusedops.hookimpl")[0]
