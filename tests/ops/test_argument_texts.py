"""Every text of an InvalidInputError of a call, word for word."""

import torch
from error_calls import INVALID, META, NESTED, X, dropout, gated, gelu, softmax
from error_texts import Table

import fusedops

TABLE = Table(__file__, "fakes")
pin = TABLE.pin

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
CLASSES = torch.tensor([0, 1])
pin("a class", lambda: fusedops.cross_entropy(X, CLASSES + 3), INVALID)
pin("denominator", lambda: fusedops.cross_entropy(X, CLASSES, denominator="2"), INVALID)
pin("target's shape", lambda: fusedops.cross_entropy(X, CLASSES[:1]), INVALID)
pin("weight's size", lambda: fusedops.linear_cross_entropy(X, X[:, :3], CLASSES), INVALID)
pin("nested", gelu(NESTED), INVALID)
pin("a spec", gelu(fusedops.TensorSpec((2, 4))), INVALID)
pin("an argument", lambda: fusedops.explain("bias_gelu"), INVALID)
pin("a spec's sizes", lambda: fusedops.TensorSpec((2, -1)), INVALID)
pin("a spec's shape", lambda: fusedops.TensorSpec("ab"), INVALID)  # type: ignore[arg-type]

test_a_text, test_no_text_is_left_over = TABLE.tests()
