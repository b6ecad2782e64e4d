"""The command ``python -m tests.fuzz.verified``: right calls under verify, and errors planted in right kernels.

A right call that verify reports is a false alarm. A planted error that it does not report is unseen.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tests.fuzz.effects import called
from tests.fuzz.machine import prepare, targets

if __name__ == "__main__":
    prepare()

import torch
from loopback import contiguous, forward_parameters, registered
from torch import Tensor

import fusedops
from fusedops import FusedOpsError, MismatchError, Op, testing
from fusedops.dtypes import STORAGE
from fusedops.testing import OPS, Case
from tests.fuzz.call import Call, Made
from tests.fuzz.check import gradients_of, mode_block, policy_block
from tests.fuzz.compare import deviates
from tests.fuzz.generate import generate

# ------------------------------------------------------------------------------------------------------ right calls


def false_alarms(
    count: int, seed: str, ops: Sequence[str] = (), backends: Sequence[str] = ()
) -> tuple[list[str], Counter[str]]:
    """Make random calls under verify until ``count`` were compared.

    Returns:
        The mismatches, but of kernels with a declared deviation, and how many calls each backend served.
    """
    aims = targets(ops, backends)
    alarms, served = list[str](), Counter[str]()
    at = -1
    while served.total() < count:
        at += 1
        aim = aims[at % len(aims)]
        call = _without_special_values(generate(aim, f"{seed}:{aim.op}:{aim.backend}:{at}"))
        against = "reference" if at % 3 else "eager"
        space: dict[str, Any] = {"torch": torch, "math": math, "fusedops": fusedops, "check": partial(_served, against)}
        try:
            exec(call.body(), space)
        except MismatchError as error:
            served[error.mismatch.backend] += 1
            if deviates(error.mismatch.backend, aim.op):  # by its declaration
                continue
            alarms.append(f"against {against}: {error}\n{call.program()}")
            print(f"false alarm {alarms[-1]}", flush=True)
        else:
            served.update(space["outcome"])
    return alarms, served


def _without_special_values(call: Call) -> Call:
    """Return the call without NaN, infinities and largest numbers, with which results may depend on rounding."""
    args = {name: replace(arg, extremes=()) if isinstance(arg, Made) else arg for name, arg in call.args.items()}
    return replace(call, args=args)


def _served(
    against: str,
    name: str,
    args: Mapping[str, Any],
    backend: str,
    *,
    grads: tuple[str, int],
    mode: str,
    channel: str,
    fallback: Any,
    adapt: Any,
    situation: str,
) -> list[str]:
    """Make a call under verify; return the backend that served forward where its numbers were compared."""
    op, options = OPS[name], {"backend": backend} if channel == "argument" else {}
    with (
        warnings.catch_warnings(),
        policy_block(backend, channel, fallback, adapt),
        mode_block(mode),
        fusedops.verify(against) as report,
    ):
        warnings.simplefilter("ignore")
        try:
            outputs = called(op, args, options)
            if mode == "grad":
                present = [(key, y) for key, y in zip(op.outputs, outputs) if y is not None]
                gradients_of([key for key, _ in present], [y for _, y in present], args, grads)
        except MismatchError:
            raise
        except FusedOpsError:
            return []
    return [row.backend for row in report.rows][:1]


# --------------------------------------------------------------------------------------------------- planted errors

BLOCKS = 64  # of rows, whose gradients are added up
ROWS = (256, 1024, 4096, 16384)
COLUMNS = 64
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CALLS: Mapping[str, Callable[[int], dict[str, Any]]] = {  # ops whose sample grows with rows in two dims
    "attention": lambda rows: {"q": (1, 2, rows, 16), "k": (1, 1, 64, 16), "v": (1, 1, 64, 16), "return_lse": True},
    "scaled_masked_softmax": lambda rows: {"x": (1, rows, 64), "scale": 1.0},
    "linear_cross_entropy": lambda rows: {
        "x": (rows, 6),
        "weight": (64, 6),
        "target": (rows,),
        "bias": (64,),
        "reduction": "none",
    },
}


def _at_largest(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def changed(result: Tensor) -> Tensor:
        flat = result.clone().reshape(-1)
        at = int(flat.double().abs().argmax())
        flat[at] = change(flat[at])
        return flat.view(result.shape)

    return changed


def _last_zero(result: Tensor) -> Tensor:
    flat = result.clone().reshape(-1, result.shape[-1])
    flat[len(flat) // 2 :, result.shape[-1] // 2 :] = 0
    return flat.view(result.shape)


#: What is done to one result of a kernel.
CHANGES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "negated": torch.neg,
    "0": torch.zeros_like,
    "a tenth too large": lambda result: result * 1.1,
    "one element of the other sign": _at_largest(torch.neg),
    "one element NaN": _at_largest(lambda value: math.nan),
    "one element a tenth too small": _at_largest(lambda value: value * 0.9),
    "shifted by one": lambda result: result.roll(1, -1),
    "a corner 0": _last_zero,
}


def _added_in_16_bits(right: Tensor, term: Callable[[int], Tensor]) -> Tensor:
    total = torch.zeros_like(right)
    for block in range(BLOCKS):
        total += term(block).to(right.dtype)
    return total


#: What is done to a gradient in 16 bits that is a sum over rows, from it and the terms of blocks of rows.
SUMS: Mapping[str, Callable[[Tensor, Callable[[int], Tensor]], Tensor]] = {
    "negated": lambda right, term: -right,
    "added in 16 bits": _added_in_16_bits,
    "without the last block": lambda right, term: right - term(BLOCKS - 1),
    "with a block twice": lambda right, term: right + term(0),
}


def arguments_of(op: Op, rows: int, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    """Return the arguments of a call with so many rows of normal numbers."""
    assert op.evidence.sample is not None
    call = CALLS[op.name](rows) if op.name in CALLS else dict(op.evidence.sample(1, rows))
    columns = call[op.parameters[0]][-1]
    if op.name not in CALLS and len(call[op.parameters[0]]) == 3 and columns != rows:
        call = {
            name: tuple(COLUMNS if size == columns else size for size in value) if isinstance(value, tuple) else value
            for name, value in call.items()
        }
    args = testing.arguments(op, Case("rows", call), dtype, seed=seed)
    return tuple(arg / 3 if isinstance(arg, Tensor) and arg.dtype in STORAGE else arg for arg in args)


def sums(op: Op, args: Sequence[Any]) -> list[str]:
    """Return the parameters whose gradients are sums over all ``ROWS[0]`` rows: no state, which decays with them."""
    tensors = {name: arg for name, arg in zip(op.parameters, args) if isinstance(arg, Tensor)}
    most = tensors[op.parameters[0]].numel()
    names = [name for name in op.differentiable if name in tensors and not name.endswith("state")]
    return [name for name in names if 0 < tensors[name].numel() < most and ROWS[0] not in tensors[name].shape]


class Planted:
    """One error in the right kernels of an op.

    Attributes:
        text: the op, the result, the dtype, the rows and the error.
        in_effect: True where it moved an element by more than a tenth of the result's root mean square: less may be
            a rounding that the op allows.
    """

    def __init__(self, op: Op, direction: str, at: int, rows: int, dtype: torch.dtype, fault: str, seed: int) -> None:
        self.op, self.direction, self.at, self.rows, self.fault = op, direction, at, rows, fault
        self.dtype, self.seed = dtype, seed
        self.against = "reference" if seed % 3 else "eager"
        self.in_effect = False
        names = (*op.outputs, *(f"saved {each.name}" for each in op.saved)) if direction == "forward" else ()
        result = names[at] if names else f"gradient of {op.differentiable[at]}"
        self.text = f"{op.name} {str(dtype).removeprefix('torch.')}, {rows} rows, {result}: {fault} ({self.against})"

    def seen(self) -> bool:
        """Make the call under verify; return True where it reports the planted result."""
        op, args = self.op, arguments_of(self.op, self.rows, self.dtype, self.seed)
        leaves = [args[op.parameters.index(name)] for name in op.differentiable]
        wanted = [leaf.requires_grad_() for leaf in leaves if leaf is not None]
        with registered(self._backend()), fusedops.use("planted"), fusedops.verify(self.against):
            try:
                results = op.as_tuple(op.call_public(*args))[: len(op.with_gradient)]
                outputs = [y for y in results if y is not None]
                generator = torch.Generator().manual_seed(1)
                grads = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs]
                torch.autograd.grad(outputs, wanted, grads)
            except MismatchError as error:
                return error.mismatch.direction == self.direction
        return False

    def _backend(self) -> fusedops.Backend:
        op = self.op
        kernels: list[Any] = []
        for direction, function in (("forward", op.reference_with_saved), ("backward", op.backward)):
            names = forward_parameters(op) if direction == "forward" else op.backward_parameters
            run = partial(self._run, function) if direction == self.direction else function
            made = contiguous(run, *names)
            kernels.append(fusedops.kernel(op.name, direction=direction, source="the reference")(made))  # type: ignore
        return fusedops.Backend("planted", ("cpu",), -50, kernels)

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        results = function(*args)
        each = list(results) if isinstance(results, (tuple, list)) else [results]
        right = each[self.at]
        if right is None or not right.numel() or not right.is_floating_point():
            return results
        if self.fault in CHANGES:
            each[self.at] = CHANGES[self.fault](right)
        else:
            each[self.at] = SUMS[self.fault](right, partial(self._block, function, args))
        moved = (each[self.at].double() - right.double()).abs().nan_to_num(nan=math.inf).max()
        self.in_effect = bool(moved > 0.1 * right.double().square().mean().sqrt())
        return tuple(each) if isinstance(results, (tuple, list)) else each[0]

    def _block(self, function: Callable[..., Any], args: tuple[Any, ...], block: int) -> Tensor:
        """Return the result with the gradients of one block of rows, the others 0: backward is linear in them."""
        size = self.rows // BLOCKS
        count = len(self.op.backward_call.grads)
        grads: list[Tensor] = []
        for grad in args[:count]:
            if self.rows not in grad.shape:  # the gradient of a state: of no row, so in one block
                grads.append(grad if block == 0 else torch.zeros_like(grad))
                continue
            kept = torch.zeros(self.rows, dtype=torch.bool)
            kept[block * size : (block + 1) * size] = True
            dim = grad.shape.index(self.rows)
            grads.append(grad * kept.view([-1 if at == dim else 1 for at in range(grad.dim())]))
        results = function(*grads, *args[count:])
        return results[self.at] if isinstance(results, (tuple, list)) else results


def planted(seed: int) -> Iterator[Planted]:
    """Yield errors: every third is in a sum over rows in a 16-bit dtype, as long as there are any."""
    dice = random.Random(seed)
    names = [(op, name) for op in OPS.values() for name in sums(op, arguments_of(op, ROWS[0], torch.float32, seed))]
    of_rows = [
        Planted(op, "backward", op.differentiable.index(name), rows, dtype, fault, dice.getrandbits(30))
        for at, (op, name) in enumerate(names)
        for (i, dtype), (j, rows) in itertools.product(enumerate(DTYPES[:2]), enumerate(ROWS))
        for fault in [[*SUMS][(at + i + j) % len(SUMS)]]
    ]
    dice.shuffle(of_rows)
    while True:
        if of_rows:
            yield of_rows.pop()
        for _ in range(2):
            op = dice.choice([op for op in OPS.values() if not op.written])  # what a kernel returns is not read then
            direction = dice.choice(("forward", "backward") if op.has_gradient else ("forward",))
            results = len(op.outputs) + len(op.saved) if direction == "forward" else len(op.differentiable)
            rows, dtype, fault = dice.choice((4, 64, 257)), dice.choice(DTYPES), dice.choice([*CHANGES])
            yield Planted(op, direction, dice.randrange(results), rows, dtype, fault, dice.getrandbits(30))


def unseen(count: int, seed: int) -> tuple[list[str], int]:
    """Plant errors until ``count`` were in effect.

    Returns:
        Those that verify did not report, and how many were in sums over rows.
    """
    missed, of_sums, errors = list[str](), 0, planted(seed)
    while count:
        each = next(errors)
        seen = each.seen()
        if seen or each.in_effect:
            count -= 1
            of_sums += each.fault in SUMS and each.rows >= ROWS[0]
            if not seen:
                missed.append(each.text)
                print(f"unseen: {each.text}", flush=True)
    return missed, of_sums


def main() -> int:
    """Run both, print the counts, and return 1 where one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.verified", description=__doc__)
    parser.add_argument("--calls", type=int, default=5000, help="right calls; default 5000")
    parser.add_argument("--errors", type=int, default=300, help="planted errors; default 300")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--op", action="append", default=[], help="only this op, of the right calls; may be repeated")
    parser.add_argument("--backend", action="append", default=[], help="only this backend; may be repeated")
    options = parser.parse_args()
    missed, of_sums = unseen(options.errors, options.seed)
    print(f"{options.errors} planted errors, {of_sums} in sums over {ROWS[0]} to {ROWS[-1]} rows: {len(missed)} unseen")
    alarms, served = false_alarms(options.calls, str(options.seed), options.op, options.backend)
    print(f"{served.total()} right calls, {dict(served)}: {len(alarms)} false alarms")
    return 1 if missed or alarms else 0


if __name__ == "__main__":
    sys.exit(main())
