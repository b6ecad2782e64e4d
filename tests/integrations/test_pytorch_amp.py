"""torch.autocast: op by op. The inputs' dtypes decide; the arithmetic is in float32."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from ascend import ascend
from calls import (
    every_op,
    has_fixed_rank,
    inputs,
    loss,
    on_backends,
    outputs,
    public,
    reference,
    with_gradient,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedops
from fusedops.constraints import PackedRows
from fusedops.testing import OPS

WITH_MATMULS = (
    "attention",
    "experts",
    "grouped_matmul",
    "int8_linear",
    "linear",
    "linear_cross_entropy",
    "linear_log_probs",
    "quantized_experts",
    "quantized_linear",
    "sparse_attention",
    "varlen_attention",
)  # in the reference


#: Kernels whose products have 16-bit results, to which a bias is added, or which are factors of the next ones.
ROUNDED = (("experts", "triton"), ("grouped_matmul", "triton"))

# For each op, dtypes of its floating inputs, in the order of its parameters. The last one stands for the rest.
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES: dict[str, list[list[torch.dtype]]] = {
    "add_layer_norm": [[BF16], [BF16, FP32]],
    "add_rms_norm": [[BF16], [BF16, FP32]],
    "attention": [[BF16], [FP32]],
    "causal_conv1d": [[BF16], [FP32], [BF16, FP32, FP32, BF16]],
    "linear_cross_entropy": [[BF16, FP32], [FP32]],
    "linear_log_probs": [[BF16, FP32], [FP32]],
    "merge_attention": [[BF16, FP32, BF16, FP32], [FP32], [BF16, FP32]],
    "rotary_embedding": [[FP16], [BF16, BF16, FP32]],
    "sparse_attention": [[BF16], [FP32]],
    "varlen_attention": [[BF16], [FP32]],
}
OTHERS = [[BF16], [FP32], [BF16, FP32]]


#: The arguments whose dtypes the first result has, promoted as torch does; none: float32. Else the first argument's.
RESULT_OF: dict[str, tuple[str, ...]] = {
    "bias_dropout": ("x", "bias"),
    "bias_dropout_add": ("residual",),
    "bias_gelu": ("x", "bias"),
    "cross_entropy": (),
    "geglu": ("gate", "up"),
    "linear_attention": ("v",),
    "linear_cross_entropy": (),
    "linear_log_probs": (),
    "merge_attention": ("out_a", "out_b"),
    "swiglu": ("gate", "up"),
    "top_k_routing": (),
}


def rows(op: str) -> list[list[torch.dtype]]:
    """For each call to make: the dtypes of the floating inputs, and that of the result."""
    names = [name for name, tensor in zip(OPS[op].parameters, inputs(op)) if tensor.is_floating_point()]
    found: list[list[torch.dtype]] = []
    for given in DTYPES.get(op, OTHERS):
        dtypes = dict(zip(names, [*given, *[given[-1]] * len(names)]))
        of = [dtypes[name] for name in RESULT_OF.get(op, names[:1]) if name in dtypes]
        result = functools.reduce(torch.promote_types, of) if of else torch.float32
        found.append([*dtypes.values(), result])
    return found


def tensors_for_ascend(op: str) -> list[Tensor]:
    """Return inputs of sizes that Ascend's kernels take."""
    whole = has_fixed_rank(op) or any(type(item) is PackedRows for item in OPS[op].constraints)
    return inputs(op, 32) if whole else [tensor[..., :32] for tensor in inputs(op, 32)]


def converted(tensors: list[Tensor], dtypes: list[torch.dtype]) -> list[Tensor]:
    """Return the tensors with these dtypes for the floating ones."""
    wanted = iter(dtypes)
    return [tensor.to(next(wanted)) if tensor.is_floating_point() else tensor for tensor in tensors]


def call(op: str, dtypes: list[torch.dtype], device: str = "cpu") -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """The inputs of these dtypes, the first output, and the gradients of the sum of squares of all outputs."""
    given = tensors_for_ascend(op) if device == "npu" else inputs(op)
    tensors = [tensor.to(device) for tensor in converted(given, dtypes)]
    for place in with_gradient(op):
        tensors[place].requires_grad_()
    y = public(op)(*tensors)
    return tensors, outputs(y)[0], list(torch.autograd.grad(loss(y), [t for t in tensors if t.requires_grad]))


@on_backends("eager", "triton")
def test_autocast_on_a_cpu(op: str, backend: str) -> None:
    """With autocast's other dtype than x's. It reaches torch's functions alone: of triton, one call of mixed dtypes."""
    every = rows(op)
    for *given, result in every if backend == "eager" else [max(every, key=lambda dtypes: len({*dtypes}))]:
        with fusedops.use(backend, fallback="raise"):
            _, plain, plain_gradients = call(op, given)
            with torch.autocast("cpu", FP16 if given[0] == BF16 else BF16):
                tensors, y, gradients = call(op, given)
            assert y.dtype == result
            wanted = [tensor.dtype for tensor in tensors if tensor.requires_grad]
            assert [gradient.dtype for gradient in gradients] == wanted
            assert torch.equal(y, plain)
            assert all(map(torch.equal, gradients, plain_gradients))
        # one rounding of a float32 result and no more: arithmetic in the narrow dtype would be further off.
        # Triton's interpreter cuts bfloat16 off instead of rounding it
        exact = outputs(reference(op)(*(t.detach().double() if t.is_floating_point() else t for t in tensors)))
        unit = torch.finfo(result).eps / (1 if backend == "triton" else 2)
        # a norm is of the second output, the sum, which is rounded too
        sums, sum_unit = len(exact) - 1, torch.finfo(min(given, key=lambda d: -torch.finfo(d).eps)).eps
        cancelled = 1e-6 * max(1.0, float(exact[0].abs().max()))  # a small result may be a sum of large products
        if (op, backend) in ROUNDED:
            cancelled += 4 * unit * float(exact[0].abs().max())
        limits = {"rtol": 1.01 * unit + 4e-6 + sums * sum_unit, "atol": cancelled + sums * sum_unit}
        torch.testing.assert_close(y.double(), exact[0], **limits)


@every_op
def test_autocast_on_the_stand_in_for_ascend(op: str) -> None:
    with ascend(), fusedops.use(fallback="silent"):
        for *given, result in rows(op):
            _, plain, plain_gradients = call(op, given, "npu")
            with torch.autocast("npu", torch.bfloat16):
                tensors, y, gradients = call(op, given, "npu")
            assert (y.dtype, y.device.type) == (result, "npu")
            assert [gradient.dtype for gradient in gradients] == [t.dtype for t in tensors if t.requires_grad]
            assert torch.equal(y.cpu(), plain.cpu())
            assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(gradients, plain_gradients))


@every_op
def test_autocast_and_transforms(op: str) -> None:
    """The reference, which serves transforms and second derivatives, is plain torch, where autocast could reach in."""
    for *given, result in rows(op):
        tensors = converted(inputs(op), given)

        def loss(x: Tensor, rest: Any = tuple(tensors[1:])) -> Tensor:
            ys = outputs(public(op)(x, *rest))
            assert ys[0].dtype == result  # noqa: B023 - called in this turn of the loop
            return sum((y.float().square().sum() for y in ys), torch.zeros(()))

        plain = torch.func.grad(loss)(tensors[0]), torch.func.jvp(loss, (tensors[0],), (tensors[0],))[1]
        if op in WITH_MATMULS:
            continue  # autocast reaches the derivative of a matmul in a transform, as it does of a model's own
        with torch.autocast("cpu", torch.bfloat16):
            mixed = torch.func.grad(loss)(tensors[0]), torch.func.jvp(loss, (tensors[0],), (tensors[0],))[1]
        assert mixed[0].dtype == given[0]
        torch.testing.assert_close(mixed, plain)


@every_op
def test_a_fake_call_under_autocast(op: str) -> None:
    """What Dynamo, export and AOTAutograd trace with."""
    for *given, result in rows(op):
        tensors = converted(inputs(op), given)
        with FakeTensorMode() as mode, torch.autocast("cpu", torch.bfloat16):
            ys = outputs(public(op)(*map(mode.from_tensor, tensors)))
        want = outputs(public(op)(*tensors))
        assert ys[0].dtype == result
        assert [(y.dtype, y.shape) for y in ys] == [(y.dtype, y.shape) for y in want]


@pytest.mark.parametrize("op", ["bias_gelu", "add_rms_norm"])
def test_a_compiled_call_under_autocast(op: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(public(op), fullgraph=True, backend="aot_eager")
    *given, result = rows(op)[-1]
    tensors = converted(inputs(op), given)
    with torch.autocast("cpu", torch.bfloat16):
        ys = outputs(compiled(*tensors))
    assert ys[0].dtype == result
    assert all(map(torch.equal, ys, outputs(public(op)(*tensors))))
