"""A long linear_attention again and again on a GPU: the same bits each time, and the right ones.

Its tiles are near those that versions of Triton multiply wrongly, by chance: see ``fusedops_triton/linear_attention``.
"""

from __future__ import annotations

import pytest
import torch
from gpu_calls import CUDA, DEVICE, HERE
from torch import Tensor

from fusedops import Case, testing

if not HERE:
    pytest.skip("needs a GPU: `make gpu` runs these", allow_module_level=True)

OP = testing.OPS["linear_attention"]
BATCH, POSITIONS, HEADS, SIZE, REPEATS = (4, 4096, 16, 128, 30) if CUDA else (1, 160, 1, 16, 2)
CHECKED = min(POSITIONS // 2, 512)  # positions that are computed in float64, of two heads: a second for 100 of them
#: The dim of the heads is 2; there are two of v for one of q.
KEYS, VALUES = (slice(1), slice(CHECKED), slice(1)), (slice(1), slice(CHECKED), slice(2))


@pytest.mark.parametrize("beta", [True, False], ids=["beta", "without beta"])
def test_a_long_call_has_the_same_bits_each_time(beta: bool) -> None:
    positions, heads = (BATCH, POSITIONS), 2 * HEADS
    case = {"q": (*positions, HEADS, SIZE), "k": (*positions, HEADS, SIZE), "v": (*positions, heads, SIZE),
            "decay": (*positions, heads), "normalize": True}  # fmt: skip
    args = testing.arguments(
        OP, Case("long", case | ({"beta": (*positions, heads)} if beta else {})), torch.bfloat16, DEVICE
    )
    named = {name: arg for name, arg in zip(OP.parameters, args) if isinstance(arg, Tensor)}
    few = [
        arg[KEYS if name in "qk" else VALUES] if isinstance(arg, Tensor) else arg
        for name, arg in zip(OP.parameters, args)
    ]
    want = testing.expected(OP, few)
    # 0 from there on, so that the gradients of the first positions are those of a call of them alone
    grad = torch.zeros(case["v"], dtype=torch.bfloat16, device=DEVICE)
    grad[VALUES] = want.grads[0].to(grad)

    def results(grad: Tensor) -> dict[str, Tensor]:
        leaves = {name: arg.detach().requires_grad_() for name, arg in named.items()}
        out = OP.as_tuple(OP.call_public(*(leaves.get(name, arg) for name, arg in zip(OP.parameters, args))))[0]
        gradients = torch.autograd.grad(out, [*leaves.values()], grad)
        return {"output out": out.detach(), **{f"gradient of {name}": g for name, g in zip(leaves, gradients)}}

    found = results(grad)
    for what, wide in {
        "output out": want.outputs[0],
        **{f"gradient of {n}": g for n, g in want.gradients.items()},
    }.items():
        part = found[what][KEYS if what[-2:] in (" q", " k") else VALUES]
        testing.assert_within(part.cpu(), wide, want.limits[what], what)
    other = torch.randn_like(grad)
    first = results(other)
    for _ in range(REPEATS):
        for what, again in results(other).items():
            assert torch.equal(again, first[what]), what
