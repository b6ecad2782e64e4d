"""The cost of selecting a backend: a call through fusedops minus a direct call of its kernel, on small CPU tensors.

The kernel does nothing (it returns its input), so the figure is the cost of selection and argument checks, and not the
difference of two larger numbers. The eager kernel, through fusedops and called directly, is printed for comparison.

The registered route (``torch.ops.fusedops``) stands beside the plain one, for rms_norm of (4, 64). A compiled graph
calls the last pair of ops, without gradients: forward with saved values, and backward.

Absolute times differ between machines, so each row also has the ratio to ``torch.mul`` on the same tensor in the same
run. Usage: python benchmarks/overhead.py
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fusedops
from fusedops._plugins.registry import registry

CALLS, ROUNDS = 5000, 41


def cost(functions: list[Callable[[], Any]], calls: int = CALLS) -> list[float]:
    """Return the us per call of each function: the median of rounds. Functions take turns, so noise affects all."""
    rounds: list[list[float]] = [[] for _ in functions]
    for _ in range(ROUNDS):
        for times, function in zip(rounds, functions):
            times.append(timeit.timeit(function, number=calls) / calls * 1e6)
    return [statistics.median(times) for times in rounds]


def direct_nothing(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Return x: a kernel that does no work."""
    return x


def registered_route() -> None:
    """Print what rms_norm costs by the plain route, by the registered one, and as a compiled graph calls it."""
    x, weight, grad = torch.randn(4, 64), torch.randn(64), torch.randn(4, 64)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    plain: Any = fusedops.rms_norm
    plain(x, weight)
    op = fusedops.ops.OPS["rms_norm"]
    registered = torch.ops.fusedops.rms_norm.default
    backward = torch.ops.fusedops.rms_norm_backward.default
    args = (1e-6, 0.0)

    def gradients(function: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(function(*leaves, *args[:1]), leaves, grad)

    def graph() -> Any:
        with torch.no_grad():
            results = registered(x, weight, *args, save=True)
            return backward(*op.backward_arguments((grad,), results, (x, weight, *args), (True, True)))

    functions: list[Callable[[], Any]] = [
        lambda: plain(x, weight, 1e-6), lambda: registered(x, weight, *args),
        gradients(plain), gradients(lambda *given: registered(*given)[0]), graph,
    ]  # fmt: skip
    forward, forward_registered, both, both_registered, compiled = cost(functions, 500)
    print("rms_norm of (4, 64), float32, the backend that the policy selects")
    added = forward_registered - forward
    print(f"no gradient: {forward:.2f} us plain, {forward_registered:.2f} us registered, {added:.2f} us more")
    ratio = both_registered / both
    print(f"forward and backward: {both:.1f} us plain, {both_registered:.1f} us registered, {ratio:.2f} times")
    print(f"the two ops of a compiled graph: {compiled:.1f} us")


nothing = fusedops.kernel("scaled_masked_softmax")(direct_nothing)


@fusedops.kernel("scaled_masked_softmax", direction="backward")
def nothing_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """Return grad: the backward of a kernel that does no work."""
    return grad


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    x = torch.randn(2, 3, 4, 8)
    padding = torch.zeros(2, 1, 1, 8, dtype=torch.bool)
    full = torch.zeros(2, 3, 4, 8, dtype=torch.bool)
    record = registry.find("eager")
    assert record is not None
    softmax = fusedops.scaled_masked_softmax
    prepared = record.kernel("scaled_masked_softmax", "forward", "cpu")
    assert prepared is not None
    eager = prepared.kernel.call
    leaf = x.clone().requires_grad_()
    fusedops.register(fusedops.Backend("nothing", ("cpu",), 1000, (nothing, nothing_backward)))
    bound = fusedops.bind("scaled_masked_softmax", x, None, 0.5)
    rows: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
        ("no mask", lambda: softmax(x, None, 0.5), lambda: direct_nothing(x, None, 0.5, False)),
        ("mask [b, 1, 1, sk]", lambda: softmax(x, padding, 0.5), lambda: direct_nothing(x, padding, 0.5, False)),
        ("mask of x's shape", lambda: softmax(x, full, 0.5), lambda: direct_nothing(x, full, 0.5, False)),
        ("no mask, with grad", lambda: softmax(leaf, None, 0.5), lambda: direct_nothing(x, None, 0.5, False)),
        ("bound", lambda: bound(x, None, 0.5), lambda: direct_nothing(x, None, 0.5, False)),
        ("bound, with grad", lambda: bound(leaf, None, 0.5), lambda: direct_nothing(x, None, 0.5, False)),
    ]
    functions: list[Callable[[], Any]] = [lambda: torch.mul(x, x)]
    for _, through, direct in rows:
        functions += [through, direct]
    mul, *times = cost(functions)
    print(f"scaled_masked_softmax on {tuple(x.shape)} float32 CPU tensors, torch {torch.__version__}")
    print(f"{'call':20} {'through':>10} {'direct':>10} {'added':>10} {'added / torch.mul':>18}")
    for (name, _, _), through, direct in zip(rows, times[::2], times[1::2]):
        added = through - direct
        print(f"{name:20} {through:7.2f} us {direct:7.2f} us {added:7.2f} us {added / mul:17.2f}x")
    fusedops.unregister("nothing")
    through, direct = cost([lambda: softmax(x, None, 0.5), lambda: eager(x, None, 0.5, False)])
    print(f"the eager kernel, no mask: {through:.2f} us through fusedops, {direct:.2f} us directly")
    print(f"torch.mul(x, x): {mul:.2f} us")
    registered_route()


if __name__ == "__main__":
    main()
