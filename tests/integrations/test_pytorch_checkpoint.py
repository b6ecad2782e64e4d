"""The backend of backward and of the recomputation in checkpoints: after `with use(...)`, on another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import close, every_op, gradients, growing, inputs, loss, noting_backend, public, reference, registered
from state import count_plans
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops.testing import OPS


def carried(op: str, reentrant: bool) -> Callable[..., Tensor]:
    """The op in a checkpoint that carries the policy of forward along, as in docs/pytorch.md."""
    if reentrant:
        return lambda *tensors: checkpoint(
            fusedops.use(fusedops.get_policy())(public(op)), *tensors, use_reentrant=True
        )
    return lambda *tensors: checkpoint(
        public(op), *tensors, use_reentrant=False, context_fn=fusedops.checkpoint_contexts
    )


def elsewhere(function: Callable[[], Any]) -> Any:
    """Return what ``function`` returns when another thread calls it, where no ``use()`` of this one reaches."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def here(function: Callable[[], Any]) -> Any:
    return function()


places = pytest.mark.parametrize("place", [here, elsewhere], ids=["here", "another thread"])


@every_op
@places
@pytest.mark.parametrize("way", [public, registered], ids=["fusedops", "torch.ops"])
def test_backward_is_served_by_the_choice_of_forward(op: str, way: Any, place: Any) -> None:
    ran: list[tuple[Any, ...]] = []
    noting_backend(op, "noting", ran)
    tensors = growing(op, inputs(op))
    with fusedops.use("noting"):
        y = way(op)(*tensors)
    found = place(lambda: gradients(y, tensors))
    assert [who for who, _ in ran] == ["noting", "noting backward"]
    close(found, gradients(reference(op)(*tensors), tensors))


def check_recomputation(op: str, place: Any, reentrant: bool) -> None:
    ran: list[tuple[Any, ...]] = []
    noting_backend(op, "noting", ran)
    tensors = growing(op, inputs(op))
    with fusedops.use("noting"):
        y = carried(op, reentrant)(*tensors)
    found = place(lambda: gradients_of_backward(y, tensors))  # torch.autograd.grad is not for reentrant checkpoints
    assert [who for who, _ in ran] == ["noting", "noting", "noting backward"]
    assert str(fusedops.get_policy()).startswith("auto"), "the recomputation leaves no policy behind"
    close(found, gradients(reference(op)(*tensors), tensors))


def gradients_of_backward(y: Any, tensors: list[Tensor]) -> list[Tensor | None]:
    loss(y).backward()
    return [tensor.grad for tensor in tensors if tensor.requires_grad]


@every_op
@places
def test_a_reentrant_checkpoint_recomputes_with_the_choice_of_forward(op: str, place: Any) -> None:
    check_recomputation(op, place, reentrant=True)


@every_op
@places
def test_a_checkpoint_recomputes_with_the_choice_of_forward(op: str, place: Any) -> None:
    check_recomputation(op, place, reentrant=False)


@pytest.mark.parametrize("op", ["bias_dropout", "bias_dropout_add"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_a_recomputed_dropout_has_the_same_mask(op: str, reentrant: bool) -> None:
    x, *rest = [torch.ones(9, 33) for _ in OPS[op].tensors[:-1]]
    x.requires_grad_()

    def twice(x: Tensor) -> Tensor:  # the second mask depends on the first draw
        once = getattr(fusedops, op)(x, None, *rest[1:], p=0.5)
        return getattr(fusedops, op)(once, None, *rest[1:], p=0.5)

    torch.manual_seed(5)
    plain = torch.autograd.grad(twice(x).square().sum(), x)[0]
    torch.manual_seed(5)
    checkpoint(twice, x, use_reentrant=reentrant).square().sum().backward()
    assert 0 < plain.count_nonzero() < plain.numel()
    close(x.grad, plain)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_without_help_torch_recomputes_under_the_policy_of_backward(reentrant: bool) -> None:
    ran: list[tuple[Any, ...]] = []
    noting_backend("bias_dropout", "noting", ran)
    x = inputs("bias_dropout")[0].requires_grad_()
    torch.manual_seed(5)
    with fusedops.use("noting"):
        y = checkpoint(lambda x: fusedops.bias_dropout(x, None, 0.5), x, use_reentrant=reentrant)
    y.sum().backward()
    # a non-reentrant checkpoint recomputes what is kept for backward, which stays that of forward
    assert [who for who, _ in ran] == ["noting"] if reentrant else ["noting", "noting backward"]
    assert x.grad is not None
    assert torch.equal(x.grad != 0, y != 0), "the mask is that of the seed, whoever serves"


# ---------------------------------------------------------------------------------------------------- carrying a policy


def test_a_policy_is_carried_whole() -> None:
    fusedops.set_policy("eager", fallback="silent")
    with fusedops.use("triton; bias_gelu=eager"):
        taken = fusedops.get_policy()
    fusedops.set_policy("triton", fallback="raise")
    with fusedops.use("eager"), fusedops.use(taken) as policy:
        assert (
            str(policy)
            == 'use(): "triton; bias_gelu=eager"; set_policy(): "eager"; fallback silent (from set_policy())'
        )
        assert policy.order("bias_gelu") == ("eager",)
        assert policy.order("bias_dropout") == ("triton",)
        with fusedops.use("npu"):
            assert fusedops.get_policy().order("bias_dropout") == ("npu",)
        fusedops.set_policy("npu")  # a carried policy is what it was
        assert fusedops.get_policy().order("bias_dropout") == ("triton",)
    assert fusedops.get_policy().order("bias_dropout") == ("npu",)


def test_a_carried_policy_sees_backends_that_come_later() -> None:
    with fusedops.use("eager"):
        taken = fusedops.get_policy()
    x = inputs("bias_gelu")[0]
    ran: list[tuple[Any, ...]] = []
    with fusedops.use(fusedops.get_policy()):
        fusedops.bias_gelu(x)
        noting_backend("bias_gelu", "noting", ran, priority=999)
        fusedops.bias_gelu(x)
    assert [who for who, _ in ran] == ["noting"]
    with fusedops.use(taken):
        fusedops.bias_gelu(x)
    assert len(ran) == 1


def test_a_carried_policy_makes_its_plans_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = count_plans(monkeypatch)
    with fusedops.use("eager"):
        taken = fusedops.get_policy()
    for _ in range(3):
        with fusedops.use(taken):
            fusedops.bias_gelu(inputs("bias_gelu")[0])
    assert len(plans) == 1
