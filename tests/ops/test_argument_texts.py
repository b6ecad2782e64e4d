"""Every text of an InvalidInputError of a call, word for word; and of some by the way inside a transform of torch."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from error_calls import INVALID, META, NESTED, X, dropout, gated, gelu, softmax
from error_texts import Table
from torch.autograd import forward_ad

import fusedops

TABLE = Table(__file__, "fakes")
pin = TABLE.pin


def linear(q: torch.Tensor | None = None, v: torch.Tensor | None = None, **more: Any) -> Callable[[], Any]:
    rows = torch.ones(1, 4, 2, 8) if q is None else q
    return lambda: fusedops.linear_attention(rows, rows, rows if v is None else v, **more)


pin("no tensor", gelu([1.0]), INVALID)
pin("dtype", gelu(torch.ones(2, dtype=torch.int64)), INVALID)
pin("layout", gelu(torch.ones(2).to_sparse()), INVALID)
pin("rank", softmax(torch.ones(4)), INVALID)
pin("scale's kind", softmax(X, None, torch.ones(())), INVALID)
pin("scale's value", softmax(X, None, float("inf")), INVALID)
pin("scale's size", softmax(X, None, 2**70), INVALID)
pin("causal", softmax(X, causal=1), INVALID)
pin("mask's kind", softmax(X, [True]), INVALID)
pin("an additive mask", softmax(X, X), INVALID)
pin("mask's dtype", softmax(X, X.int()), INVALID)
pin("mask's layout", softmax(X, X.bool().to_sparse()), INVALID)
pin("mask's device", softmax(X, META.bool()), INVALID)
pin("mask's shape", softmax(X, X[:, :3].bool()), INVALID)
pin("bias's shape", gelu(X, torch.ones(3)), INVALID)
pin("bias's kind", gelu(X, 1.0), INVALID)
pin("form", gelu(X, approximate="erf"), INVALID)
pin("packed", gated(torch.ones(2, 7)), INVALID)
pin("limit", gated(X, X, limit=-1.0), INVALID)
pin("p", dropout(X, None, 1.5), INVALID)
pin("training", dropout(X, training=1), INVALID)
pin("seed", dropout(X, seed="7"), INVALID)
pin("seed's dtype", dropout(X, seed=torch.ones(2)), INVALID)
pin("seed's device", dropout(X, seed=META.long()[0, :1]), INVALID)
pin("a seed that the registered op needs", lambda: torch.ops.fusedops.bias_dropout(X, None, 0.5, True, None), INVALID)
pin("residual's shape", lambda: fusedops.bias_dropout_add(X, None, X[:1]), INVALID)
pin("weight's shape", lambda: fusedops.rms_norm(X, torch.ones(3)), INVALID)
pin("weight's rank", lambda: fusedops.layer_norm(X, X[:1]), INVALID)
pin("eps", lambda: fusedops.rms_norm(X, eps=-1), INVALID)
Q, COS = torch.ones(2, 4, 3, 8), torch.ones(3, 4)
pin("k's shape", lambda: fusedops.rotary_embedding(Q, Q[:1], COS, COS), INVALID)
pin("cos's shape", lambda: fusedops.rotary_embedding(Q, None, Q[0, 0], Q[0, 0]), INVALID)
CLASSES, ENDS = torch.tensor([0, 1]), torch.tensor([0, 1, 2])
pin("a class", lambda: fusedops.cross_entropy(X, CLASSES + 3), INVALID)
pin("denominator", lambda: fusedops.cross_entropy(X, CLASSES, denominator="2"), INVALID)
pin("target's shape", lambda: fusedops.cross_entropy(X, CLASSES[:1]), INVALID)
pin("a number of rows", lambda: fusedops.sample(X, top_p=0.0, seed=1, position=0), INVALID)
pin("a seed of rows", lambda: fusedops.sample(X, seed=1.5, position=0), INVALID)
pin("seeds of rows", lambda: fusedops.sample(X, seed=torch.ones(2), position=0), INVALID)
pin("weight's size", lambda: fusedops.linear_cross_entropy(X, X[:, :3], CLASSES), INVALID)
ROTATED, HEADS, ANGLES = torch.ones(2, 4, 9, 16), torch.ones(2, 2, 9, 16), torch.ones(9, 8)


def rotary(q: Any = ROTATED, k: Any = HEADS, cos: Any = ANGLES, sin: Any = ANGLES, **options: Any) -> Callable[[], Any]:
    return lambda: fusedops.rotary_embedding(q, k, cos, sin, **options)


def loss(logits: Any = X, target: Any = CLASSES, **options: Any) -> Callable[[], Any]:
    return lambda: fusedops.cross_entropy(logits, target, **options)


def experts(**changes: Any) -> Callable[[], Any]:
    """A call of three experts of 4 rows of 6 columns, with some of its tensors changed."""
    given = {"x": torch.ones(2, 6), "up": torch.ones(3, 8, 6), "down": torch.ones(3, 6, 4), "weights": torch.ones(2, 2)}
    return lambda: fusedops.experts(index=torch.zeros(2, 2, dtype=torch.long), **{**given, **changes})


pin("q's rank", rotary(ROTATED[0, 0], None), INVALID)
pin("k's rank", rotary(k=HEADS[0]), INVALID)
pin("k's width", rotary(k=HEADS[..., :8]), INVALID)
pin("k in the other layout", rotary(seq_dim=-3), INVALID)
pin("cos in the other layout", rotary(k=None, seq_dim=-3), INVALID)
pin("a doubled cos", rotary(cos=torch.ones(9, 16), sin=torch.ones(9, 16)), INVALID)
pin("cos of another batch", rotary(cos=torch.ones(3, 9, 8), sin=torch.ones(3, 9, 8)), INVALID)
pin("cos with heads", rotary(cos=torch.ones(2, 4, 9, 8), sin=torch.ones(2, 4, 9, 8)), INVALID)
pin("cos with one position of each head", rotary(cos=torch.ones(2, 9, 1, 8), sin=torch.ones(2, 9, 1, 8)), INVALID)
pin("sin's shape", rotary(sin=ANGLES[:, :4]), INVALID)
pin("q's dtype", rotary(ROTATED.int()), INVALID)
pin("cos's dtype", rotary(cos=ANGLES.int()), INVALID)
pin("no cos", rotary(cos=None), INVALID)
pin("seq_dim", rotary(seq_dim=1), INVALID)
pin("interleaved", rotary(interleaved=1), INVALID)
pin("k's device", rotary(k=HEADS.to("meta")), INVALID)
pin("a denominator of a sum", loss(reduction="sum", denominator=2.0), INVALID)
pin("an infinite denominator", loss(denominator=float("inf")), INVALID)
pin("two denominators", loss(denominator=torch.ones(2)), INVALID)
pin("softcap", loss(softcap=0.0), INVALID)
pin("z_loss", loss(z_loss=-1.0), INVALID)
pin("label_smoothing", loss(label_smoothing=1.5), INVALID)
pin("ignore_index", loss(ignore_index=1.0), INVALID)
pin("reduction", loss(reduction="avg"), INVALID)
pin("no classes", loss(torch.empty(3, 0), torch.zeros(3, dtype=torch.int64)), INVALID)
pin("torch's layout of classes", loss(torch.ones(2, 9, 4), torch.zeros(2, 4, dtype=torch.int64)), INVALID)
pin("a number and no up", gated(torch.tensor(1.0)), INVALID)
pin("up's shape", gated(torch.ones(2, 6), torch.ones(6)), INVALID)
pin("an infinite limit", gated(X, limit=float("inf")), INVALID)
pin("alpha", gated(X, alpha=None), INVALID)
pin("swiglu's interleaved", gated(X, interleaved=1), INVALID)
pin("no residual", lambda: fusedops.bias_dropout_add(X, None, None), INVALID)
pin("down's shape", experts(down=torch.ones(3, 4, 6)), INVALID)
pin("up the other way", experts(up=torch.ones(3, 6, 8)), INVALID)
pin("up_bias's shape", experts(up_bias=torch.ones(2, 8)), INVALID)
pin("a weight the other way", lambda: fusedops.grouped_matmul(X, torch.ones(3, 4, 6), ENDS), INVALID)
pin("other columns", lambda: fusedops.grouped_matmul(X, torch.ones(3, 5, 6), ENDS, transposed=True), INVALID)
pin("ends of other groups", lambda: fusedops.grouped_matmul(X, torch.ones(2, 6, 4), ENDS), INVALID)
pin("ends that are floats", lambda: fusedops.grouped_matmul(X, torch.ones(3, 6, 4), ENDS.float()), INVALID)
pin("a bound past the positions", linear(cu_seqlens=ENDS + 3), INVALID)
pin(
    "a bound past the inputs",
    lambda: fusedops.causal_conv1d(torch.ones(1, 4, 4), torch.ones(4, 4), cu_seqlens=ENDS + 3),
    INVALID,
)
pin("bounds in a batch of several", linear(torch.ones(2, 4, 1, 1), cu_seqlens=ENDS), INVALID)
pin("value heads that are no multiple", linear(v=torch.ones(1, 4, 3, 8)), INVALID)
pin("a decay of other heads", linear(decay=torch.ones(1, 4, 3)), INVALID)
pin("a beta of each row", linear(beta=torch.ones(1, 4, 2, 8)), INVALID)
pin("a state of other rows", linear(initial_state=torch.ones(1, 2, 3, 8)), INVALID)
pin("the states of packed sequences", linear(initial_state=torch.ones(1, 2, 8, 8), cu_seqlens=ENDS), INVALID)
pin("an end past the rows", lambda: fusedops.grouped_matmul(X, torch.ones(3, 6, 4), ENDS + 1), INVALID)
pin("nested", gelu(NESTED), INVALID)
pin("a spec", gelu(fusedops.TensorSpec((2, 4))), INVALID)
pin("an argument", lambda: fusedops.explain("bias_gelu"), INVALID)
pin("a spec's sizes", lambda: fusedops.TensorSpec((2, -1)), INVALID)
pin("a spec's shape", lambda: fusedops.TensorSpec("ab"), INVALID)  # type: ignore[arg-type]

FIVE_DIMS = torch.ones(2, 3, 5, 7)
IN_A_TRANSFORM = {
    "x None": softmax(None),
    "x array": softmax(numpy.ones((2, 2))),
    "x bool": softmax(torch.ones(2, 2) > 0),
    "x complex": softmax(torch.ones(2, 2, dtype=torch.complex64)),
    "x float8": softmax(torch.ones(2, 2).to(torch.float8_e5m2)),
    "x rank 1": softmax(torch.ones(2)),
    "x rank 0": softmax(torch.ones(())),
    "mask list": softmax(X, [True]),
    "mask bool": softmax(X, True),
    "mask int": softmax(X, torch.zeros(2, 4, dtype=torch.int64)),
    "mask of the batch": softmax(FIVE_DIMS, torch.zeros(2, 7) > 0),
    "mask rank": softmax(FIVE_DIMS, torch.zeros(1, 2, 3, 5, 7) > 0),
    "scale text": softmax(X, None, "0.5"),
    "scale None": softmax(X, None, None),
    "scale complex": softmax(X, None, 1j),
    "scale nan": softmax(X, None, float("nan")),
    "scale of float64": softmax(X, None, 1e39),
    "causal None": softmax(X, causal=None),
}
for name, call in IN_A_TRANSFORM.items():
    pin(name, call, INVALID)
pin("a module's dims", lambda: fusedops.nn.RMSNorm((4, 8)), INVALID)
pin("a module's dim of another kind", lambda: fusedops.nn.LayerNorm(8.0), INVALID)  # type: ignore[arg-type]
pin("a module's eps", lambda: fusedops.nn.RMSNorm(4, None)(X), INVALID)  # type: ignore[arg-type]
pin("weights of classes", lambda: fusedops.nn.CrossEntropyLoss(X), INVALID)  # type: ignore[arg-type]
pin("torch's old reduction", lambda: fusedops.nn.CrossEntropyLoss(size_average=False), INVALID)  # type: ignore
pin("losses of several dims", lambda: fusedops.nn.LinearCrossEntropyLoss(8, 5, out_features=(2,)), INVALID)

test_a_text, test_no_text_is_left_over = TABLE.tests()


@pytest.mark.parametrize("name", [*IN_A_TRANSFORM, "scale's kind", "scale's value", "causal", "an additive mask"])
def test_a_text_inside_a_transform(name: str) -> None:
    with forward_ad.dual_level():
        TABLE.check(name)
