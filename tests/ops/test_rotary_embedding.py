"""rotary_embedding: what peers compute, and the contract on each backend."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedops
from fusedops import testing

OP = testing.OPS["rotary_embedding"]
INF, NAN = float("inf"), float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_backend = pytest.mark.parametrize("backend", ["eager", "triton", "cpu"])
every_pairing = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return cos and sin of random angles."""
    angle = 3 * random(*shape, seed=7).double()
    return angle.cos().to(dtype), angle.sin().to(dtype)


# ------------------------------------------------------------------------------------------------------------- peers


def rounded_steps(dtype: torch.dtype) -> dict[str, float]:
    """Return the tolerance beside a model that rounds cos, sin and three steps to ``dtype``, for numbers of about 1."""
    return {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 4e-2}


def gradients_of(function: Any, *tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    outputs = list(function(*leaves))
    return outputs, list(torch.autograd.grad(outputs, leaves, [random(*y.shape, seed=3).to(y.dtype) for y in outputs]))


class Model(NamedTuple):
    """A family of transformers.

    Attributes:
        name: of its module and, with a capital, of its classes.
        config: what its config is made of.
        width: of its cos.
        half: which columns of its cos and sin are one entry for each rotated pair.
        interleaved: True for pairs that lie side by side.
    """

    name: str
    config: dict[str, Any]
    width: int
    half: slice
    interleaved: bool = False


HEADS = {"hidden_size": 64, "num_attention_heads": 4}
MODELS = [
    Model("Llama", {**HEADS, "num_key_value_heads": 2}, 16, slice(8)),
    # half of each head rotates
    Model("Glm4", {**HEADS, "head_dim": 16, "partial_rotary_factor": 0.5}, 8, slice(4), interleaved=True),
    # doubles cos by repetition
    Model("Cohere", {**HEADS, "num_key_value_heads": 2}, 16, slice(None, None, 2), interleaved=True),
    # cos of half the width, which YaRN scales
    Model("GptOss", {"head_dim": 16, "max_position_embeddings": 4096}, 8, slice(8)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@every_backend
def test_a_model_of_transformers(backend: str, model: Model, dtype: torch.dtype) -> None:
    folder = {"GptOss": "gpt_oss"}.get(model.name, model.name.lower())
    name = f"transformers.models.{folder}.modeling_{folder}"
    modeling = pytest.importorskip(name, reason="needs transformers")
    # (B, S, N, D), viewed with the heads first, as the attention has them
    q, k = (random(2, 7, heads, 16, dtype=dtype, seed=heads).transpose(1, 2) for heads in (4, 2))
    embedding = getattr(modeling, f"{model.name}RotaryEmbedding")(
        getattr(modeling, f"{model.name}Config")(**model.config)
    )
    cos, sin = embedding(q, torch.arange(7).expand(2, 7))
    assert cos.shape == (2, 7, model.width)
    assert model.name != "GptOss" or cos[:, 0].max() > 1
    want = gradients_of(lambda q, k: modeling.apply_rotary_pos_emb(q, k, cos, sin), q, k)
    half, options = (cos[..., model.half], sin[..., model.half]), {"interleaved": model.interleaved, "backend": backend}
    got = gradients_of(lambda q, k: fusedops.rotary_embedding(q, k, *half, **options), q, k)
    torch.testing.assert_close(got, want, **rounded_steps(dtype))


@pytest.mark.parametrize("seq_dim", [-2, -3])
@pytest.mark.parametrize("batch", [(2,), (1,), ()], ids=str)
@every_backend
def test_a_head_dim_of_one_is_dropped(backend: str, batch: tuple[int, ...], seq_dim: int) -> None:
    """As ``cos.unsqueeze(1)`` of transformers' models gives it."""
    q = random(*(2 for _ in batch), *((3, 7) if seq_dim == -2 else (7, 3)), 16)
    cos, sin = angles(*batch, 7, 4)
    given = [angle.unsqueeze(-3 if seq_dim == -2 else -2) for angle in (cos, sin)]
    want = fusedops.rotary_embedding(q, None, cos, sin, seq_dim=seq_dim, backend=backend)
    got = fusedops.rotary_embedding(q, None, *given, seq_dim=seq_dim, backend=backend)
    assert torch.equal(got[0], want[0])
    assert fusedops.explain(fusedops.rotary_embedding, q, None, *given, seq_dim=seq_dim, backend=backend).backend
    torch.compiler.reset()  # one function, compiled for many ranks and backends
    compiled = torch.compile(fusedops.rotary_embedding, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, None, *given, seq_dim=seq_dim, backend=backend)[0], want[0])


@every_pairing
def test_megatron_has_the_positions_first(interleaved: bool) -> None:
    utils = pytest.importorskip("megatron.core.models.common.embeddings.rope_utils", reason="needs megatron-core")
    q, angle = random(7, 2, 4, 16), random(7, 5)
    double = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    want = utils._apply_rotary_pos_emb_bshd(q, double[:, None, None], rotary_interleaved=interleaved)
    got, _ = fusedops.rotary_embedding(
        q.transpose(0, 1), None, angle.cos(), angle.sin(), interleaved=interleaved, seq_dim=-3
    )
    torch.testing.assert_close(got, want.transpose(0, 1))


def test_liger() -> None:
    rope = pytest.importorskip("liger_kernel.ops.rope", reason="needs liger-kernel")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, which Liger's kernel runs on")
    q, k = random(2, 4, 7, 16).cuda(), random(2, 2, 7, 16, seed=1).cuda()
    cos, sin = (angle.cuda() for angle in angles(1, 7, 8))
    double = [torch.cat((angle, angle), -1) for angle in (cos, sin)]
    want = rope.LigerRopeFunction.apply(q.clone(), k.clone(), *double)
    torch.testing.assert_close(fusedops.rotary_embedding(q, k, cos, sin), want)


# ------------------------------------------------------------------------------------------------------ the contract


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotated", [32, 20, 2, 0])
@every_pairing
@every_backend
def test_whole_and_partial_heads(backend: str, interleaved: bool, rotated: int, dtype: torch.dtype) -> None:
    q, k = random(2, 4, 9, 32, dtype=dtype), random(2, 2, 9, 32, dtype=dtype, seed=1)
    q[..., rotated:][..., :3] = torch.tensor([INF, NAN, -0.0])[: max(0, min(3, 32 - rotated))]
    y, _ = fusedops.rotary_embedding(q, k, *angles(9, rotated // 2), interleaved=interleaved, backend=backend)
    assert torch.equal(y[..., rotated:].nan_to_num(), q[..., rotated:].nan_to_num())
    assert torch.equal(y[..., rotated:].signbit(), q[..., rotated:].signbit())


@every_backend
def test_cos_and_sin_have_no_gradient(backend: str) -> None:
    q, (cos, sin) = random(2, 4, 9, 16), angles(9, 8)
    leaves = [q.requires_grad_(), cos.requires_grad_(), sin.requires_grad_()]
    # compiled code has the registered op, which calls any backend alike
    compiled = [torch.compile(fusedops.rotary_embedding, backend="aot_eager")] if backend == "eager" else []
    for function in (fusedops.rotary_embedding, *compiled):
        y, _ = function(leaves[0], None, *leaves[1:], backend=backend)
        found = torch.autograd.grad(y.sum(), leaves, allow_unused=True)
        assert found[0] is not None
        assert found[1:] == (None, None)

    def of_cos(cos: Tensor) -> Tensor:
        return fusedops.rotary_embedding(q.detach(), None, cos, sin.detach(), backend=backend)[0].sum()

    assert not torch.func.grad(of_cos)(cos.detach()).any()
    assert not torch.func.jvp(of_cos, (cos.detach(),), (torch.ones(9, 8),))[1].any()


# ------------------------------------------------------------------------------------------------------------ k None


@every_backend
def test_without_k_the_second_result_is_none(backend: str) -> None:
    q, (cos, sin) = random(2, 4, 9, 16).requires_grad_(), angles(9, 8)
    want, _ = fusedops.rotary_embedding(q, random(2, 1, 9, 16), cos, sin, backend=backend)
    with fusedops.verify("reference") as report:
        y, none = fusedops.rotary_embedding(q, None, cos, sin, backend=backend)
        (gradient,) = torch.autograd.grad(y.sum(), q)
    assert none is None
    assert torch.equal(y, want)
    assert torch.equal(gradient, torch.autograd.grad(want.sum(), q)[0])
    assert {row.result for row in report.rows} >= {"output rotated_q", "gradient of q"}
    bound = fusedops.bind("rotary_embedding", q, None, cos, sin, backend=backend)
    z, none = bound(q, None, cos, sin)
    assert none is None
    assert torch.equal(z, want)
    mapped = torch.vmap(lambda x: fusedops.rotary_embedding(x, None, cos, sin)[0])(q.detach())
    torch.testing.assert_close(mapped, want)


def test_without_k_in_code_that_is_traced() -> None:
    q, (cos, sin) = random(2, 4, 9, 16).requires_grad_(), angles(9, 8)
    want = fusedops.rotary_embedding(q, None, cos, sin)[0]

    def alone(q: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, bool]:
        y, none = fusedops.rotary_embedding(q, None, cos, sin)
        return y, none is None

    torch._dynamo.reset()
    y, none = torch.compile(alone, fullgraph=True, backend="aot_eager")(q, cos, sin)
    assert none is True
    assert torch.equal(y, want)
    assert torch.equal(torch.autograd.grad(y.sum(), q)[0], torch.autograd.grad(want.sum(), q)[0])
    graph = torch.fx.symbolic_trace(lambda q, cos, sin: fusedops.rotary_embedding(q, None, cos, sin)[0])
    assert torch.equal(graph(q, cos, sin), want)
    exported = torch.export.export(_Alone(), (q.detach(), cos, sin))
    assert torch.equal(exported.module()(q.detach(), cos, sin), want)
    with FakeTensorMode():
        fake = fusedops.rotary_embedding(torch.empty(2, 4, 9, 16), None, torch.empty(9, 8), torch.empty(9, 8))
    assert fake[0].shape == (2, 4, 9, 16)
    assert fake[1] is None


class _Alone(torch.nn.Module):
    def forward(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return fusedops.rotary_embedding(q, None, cos, sin)[0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused() -> None:
    """Their sizes were read before the constraints: RuntimeError of torch."""
    nested = torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)])
    with pytest.raises(fusedops.InvalidInputError, match="nested"):
        fusedops.rotary_embedding(nested, nested, nested, nested)
