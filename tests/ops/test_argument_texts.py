"""Every text of an InvalidInputError of a call, word for word."""

import pytest
import torch
from error_calls import INVALID, META, NESTED, X, dropout, gated, gelu, softmax
from error_texts import Table

import fusedops

TABLE = Table(__file__)
pin = TABLE.pin

pin("no tensor", gelu([1.0]), INVALID, "x of type list", "expected a torch.Tensor", "torch.as_tensor")
pin("dtype", gelu(torch.ones(2, dtype=torch.int64)), INVALID, "x of int64", "expected float16", "x.float()")
pin("layout", gelu(torch.ones(2).to_sparse()), INVALID, "torch.sparse_coo", "expected a strided", "x.to_dense()")
pin("rank", softmax(torch.ones(4)), INVALID, "x with 1 dim", "at least 2 dimensions", "view x with 2")
pin(
    "scale's kind",
    softmax(X, None, torch.ones(())),
    INVALID,
    "a tensor of 1",
    "a Python number, finite in float32",
    "scale.item()",
)
pin("scale's value", softmax(X, None, float("inf")), INVALID, "scale = inf", "finite in float32", "pass scale as")
pin("scale's size", softmax(X, None, 2**70), INVALID, "an integer of 71 bits", "finite in float32", "pass scale as")
pin("causal", softmax(X, causal=1), INVALID, "causal = 1", "expected True or False", "bool(causal)")
pin(
    "mask's kind",
    softmax(X, [True]),
    INVALID,
    "mask of type list",
    "expected a torch.Tensor or None",
    "torch.as_tensor",
)
pin("an additive mask", softmax(X, X), INVALID, "mask of float32", "expected bool or uint8", "mask < 0")
pin("mask's dtype", softmax(X, X.int()), INVALID, "mask of int32", "expected bool or uint8", "mask != 0")
pin("mask's layout", softmax(X, X.bool().to_sparse()), INVALID, "torch.sparse_coo", "a strided", "mask.to_dense()")
pin("mask's device", softmax(X, META.bool()), INVALID, "mask on meta and x on cpu", "expected one", "mask.to(x.device)")
pin(
    "mask's shape",
    softmax(X, X[:, :3].bool()),
    INVALID,
    "shape (2, 3)",
    "broadcasts to x (2, 4)",
    "give mask sizes of 1",
)
pin("bias's shape", gelu(X, torch.ones(3)), INVALID, "bias of shape (3,)", "broadcasts to x", "give bias sizes of 1")
pin("bias's kind", gelu(X, 1.0), INVALID, "bias of type float", "expected a torch.Tensor or None", "torch.as_tensor")
pin(
    "form",
    gelu(X, approximate="erf"),
    INVALID,
    "approximate = 'erf'",
    "expected 'tanh' or 'none'",
    "pass approximate as",
)
pin("packed", gated(torch.ones(2, 7)), INVALID, "(2, 7) and no up", "an even last dim", "pass up, or pack it")
pin(
    "limit", gated(X, X, limit=-1.0), INVALID, "limit = -1.0", "at least 0, finite in float32, or None", "pass limit as"
)
pin("p", dropout(X, None, 1.5), INVALID, "p = 1.5", "expected a number in [0, 1]", "pass p as")
pin("training", dropout(X, training=1), INVALID, "training = 1", "expected True or False", "bool(training)")
pin("seed", dropout(X, seed="7"), INVALID, "seed = '7'", "expected None, a 64-bit integer", "pass None")
pin("seed's dtype", dropout(X, seed=torch.ones(2)), INVALID, "seed of float32", "expected int64", "convert seed")
pin("seed's device", dropout(X, seed=META.long()[0, :1]), INVALID, "seed on meta", "expected one device", "seed.to(")
pin(
    "a seed that the registered op needs",
    lambda: torch.ops.fusedops.bias_dropout(X, None, 0.5, True, None),
    INVALID, "a registered call without", "expected every argument", "call fusedops.bias_dropout",
)  # fmt: skip
pin(
    "residual's shape",
    lambda: fusedops.bias_dropout_add(X, None, X[:1]),
    INVALID, "residual of shape (1, 4)", "expected the shape of x", "expand the smaller",
)  # fmt: skip
pin(
    "weight's shape",
    lambda: fusedops.rms_norm(X, torch.ones(3)),
    INVALID, "weight of shape (3,)", "the shape of the last dim of x, (4,)", "pass a weight of shape (4,)",
)  # fmt: skip
pin(
    "weight's rank",
    lambda: fusedops.layer_norm(X, X[:1]),
    INVALID, "weight of shape (1, 4)", "the shape of the last dim of x, (4,)", "pass weight.view(4,)",
)  # fmt: skip
pin("eps", lambda: fusedops.rms_norm(X, eps=-1), INVALID, "eps = -1", "at least 0", "pass eps as")
Q, COS = torch.ones(2, 4, 3, 8), torch.ones(3, 4)
pin(
    "k's shape",
    lambda: fusedops.rotary_embedding(Q, Q[:1], COS, COS),
    INVALID, "k of shape (1, 4, 3, 8)", "the sizes of q (2, 4, 3, 8) except", "pass k of the same tokens",
)  # fmt: skip
pin(
    "cos's shape",
    lambda: fusedops.rotary_embedding(Q, None, Q[0, 0], Q[0, 0]),
    INVALID, "cos of shape (3, 8)", "(3, R/2) or (..., 3, R/2) with R at most", "of a doubled one cos[..., : R // 2]",
)  # fmt: skip
CLASSES = torch.tensor([0, 1])
pin(
    "a class",
    lambda: fusedops.cross_entropy(X, CLASSES + 3),
    INVALID, "got target 4", "one in [0, 4) or ignore_index = -100", "as ignore_index",
)  # fmt: skip
pin(
    "denominator",
    lambda: fusedops.cross_entropy(X, CLASSES, denominator="2"),
    INVALID, "denominator = '2'", "a number, finite in float32, or a tensor of one element",
    "the number of targets that count",
)  # fmt: skip
pin(
    "target's shape",
    lambda: fusedops.cross_entropy(X, CLASSES[:1]),
    INVALID, "target of shape (1,)", "the shape of logits without its last dim, (2,)", "to fix: ",
)  # fmt: skip
pin(
    "weight's size",
    lambda: fusedops.linear_cross_entropy(X, X[:, :3], CLASSES),
    INVALID, "weight of shape (2, 3)", "of the size of dim -1 of x", "pass weight with a dim -1 of 4",
)  # fmt: skip
pin("nested", gelu(NESTED), INVALID, "x as a nested tensor", "expected a strided", "x.to_padded_tensor")
pin(
    "a spec",
    gelu(fusedops.TensorSpec((2, 4))),
    INVALID,
    "x as a TensorSpec",
    "expected a torch.Tensor",
    "fusedops.explain",
)
pin("an argument", lambda: fusedops.explain("bias_gelu"), INVALID, "no argument 'x'", "expected (x,", "give each")
pin("a spec's sizes", lambda: fusedops.TensorSpec((2, -1)), INVALID, "(2, -1)", "at least 0", "the tensor's real")
pin("a spec's shape", lambda: fusedops.TensorSpec("ab"), INVALID, "'ab'", "expected sizes", "like (8, 16")  # type: ignore[arg-type]


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", TABLE.pins)
def test_a_text(name: str) -> None:
    TABLE.check(name)


def test_no_text_is_left_over() -> None:
    TABLE.check_complete()
