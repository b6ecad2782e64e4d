"""The stand-in Ascend device: tensors, ops, random numbers, memory, models."""

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.standin import npu_device


def test_tensors_are_plain_tensors_on_npu_0(device):
    x = torch.randn(3, 4)
    y = x.to(device)
    assert type(y) is torch.Tensor
    assert (str(y.device), y.is_npu, y.dtype) == ("npu:0", True, torch.float32)
    assert type(y.transpose(0, 1)) is type(y + 1) is type(y.requires_grad_().sin()) is torch.Tensor
    assert y.device == torch.empty(0, device="npu").device == x.npu().device
    torch.testing.assert_close(y.cpu(), x, rtol=0, atol=0)


def test_products_and_long_rows_without_the_defects_of_torchs_cpu_kernels(device):
    x, row = torch.ones(1, 8, dtype=torch.bfloat16, device=device), 2 * torch.randn(1, 2**18).sign()
    infinite = torch.full((8, 1), float("-inf"), dtype=torch.bfloat16, device=device)
    assert (infinite @ x == float("-inf")).all()  # NaN where a processor has bfloat16 products (torch 2.13)
    expected = row.double().log_softmax(-1).float()
    torch.testing.assert_close(row.to(device).log_softmax(-1).cpu(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x + x * 2 - x / 3,
        lambda x, i: x @ x.transpose(-1, -2),
        lambda x, i: x.softmax(-1),
        lambda x, i: F.embedding(i, x[0]),
        lambda x, i: F.layer_norm(x, x.shape[-1:], x[0, 0], x[0, 1]),
        lambda x, i: F.cross_entropy(x[0], i[: x.shape[1]]),
        lambda x, i: x[:, i],
        lambda x, i: x[x > 0],
        lambda x, i: x[:, :1].expand(-1, 5, -1),
        lambda x, i: x.transpose(0, 2).reshape(-1, 4),
        lambda x, i: x.transpose(0, 1).contiguous().view(-1),
        lambda x, i: x.masked_fill(x > 0, float("-inf")).exp(),
        lambda x, i: x.triu(1).sum(0) + x.amax(-1, keepdim=True),
        lambda x, i: torch.cat([x, x], 1).max(-1).values,
        lambda x, i: torch.where(x > 0, x, torch.zeros((), dtype=x.dtype, device=x.device)),
        lambda x, i: torch.as_strided(x * 1, (2, 3), (4, 1), 5),
        lambda x, i: F.scaled_dot_product_attention(x[None], x[None], x[None]),
        lambda x, i: F.gelu(x, approximate="tanh"),
        lambda x, i: torch.vmap(torch.sin)(x),
    ],
)
def test_ops_and_their_gradients_equal_the_cpu(device, function):
    torch.manual_seed(0)
    values, index = torch.randn(2, 5, 4), torch.tensor([0, 3, 1, 2, 0])
    results = []
    for place in ("cpu", device):
        x = values.to(place).requires_grad_()
        y = function(x, index.to(place))
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert y.device.type == dx.device.type == torch.device(place).type
        results.append((y.detach().cpu(), dx.cpu()))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_dtypes_and_constructors(device, dtype):
    for made in (
        torch.zeros(2, 3, device=device, dtype=dtype),
        torch.ones(2, 3, device=device, dtype=dtype),
        torch.full((2, 3), 1, device=device, dtype=dtype),
        torch.empty(2, 3, device=device, dtype=dtype),
        torch.arange(2, device=device).to(dtype),
        torch.tensor([0, 1], device=device, dtype=dtype),
        torch.ones(2, 3, device=device).to(dtype),
    ):
        assert made.dtype == dtype
        assert made.device.type == "npu"
        assert torch.equal(made.cpu().npu().cpu(), made.cpu()) or made.isnan().all()


def test_values_for_the_host(device):
    x = torch.arange(6.0, device=device)
    assert x.sum().item() == 15.0
    assert bool((x >= 0).all())
    assert not bool((x > 9).any())
    assert torch.equal(x, x.clone())
    assert "npu:0" in repr(x)


def test_random_numbers_are_the_devices_own(device):
    torch.manual_seed(3)
    draws = [
        torch.rand(4, device=device),
        torch.randn(4, device=device),
        torch.randint(9, (4,), device=device),
        F.dropout(torch.ones(40, device=device), 0.5),
    ]
    torch.manual_seed(3)
    torch.rand(1000)  # the CPU's generator is another
    again = [
        torch.rand(4, device=device),
        torch.randn(4, device=device),
        torch.randint(9, (4,), device=device),
        F.dropout(torch.ones(40, device=device), 0.5),
    ]
    assert all(torch.equal(a, b) for a, b in zip(draws, again, strict=True))
    assert set(draws[3].tolist()) == {0.0, 2.0}
    state = torch.npu.get_rng_state()
    with torch.random.fork_rng(device_type="npu"):
        torch.rand(3, device=device)
    assert torch.equal(state, torch.npu.get_rng_state())
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device=device, generator=torch.Generator())


def test_views_share_their_bases_memory(device):
    base = torch.zeros(4, 6, device=device)
    view = base[1:3].transpose(0, 1)
    assert view._base is base
    assert view.untyped_storage()._cdata == base.untyped_storage()._cdata
    view.add_(1)
    assert base.sum().item() == 12
    base.view(-1)[0] = 5
    assert base[0, 0].item() == 5
    assert torch.as_strided(base, (2, 2), (6, 1), 7).sum().item() == 4
    assert base._version > 0
    assert base.reshape(24).data_ptr() == base.data_ptr() != base.clone().data_ptr()
    out = torch.empty(0, device=device)
    torch.add(base, 1, out=out)  # an out= tensor of the wrong size grows
    assert out.shape == base.shape
    assert torch.equal(out, base + 1)


def test_an_in_place_change_of_a_saved_tensor_is_caught(device):
    x = torch.ones(3, device=device, requires_grad=True)
    y = x.exp()
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_memory_does_not_grow(device):
    x = torch.ones(8, 8, device=device, requires_grad=True)
    gc.collect()
    storages, in_use = npu_device.live_storages(), npu_device.memory_allocated()
    for _ in range(50):
        (x.t()[1:] * 2).reshape(-1).sum().backward()
        x.grad = None
    gc.collect()
    assert (npu_device.live_storages(), npu_device.memory_allocated()) == (storages, in_use)
    view = torch.ones(16, device=device)[3:]  # a view alone keeps its storage
    assert npu_device.live_storages() == storages + 1
    assert npu_device.memory_allocated() == in_use + 64
    gone = weakref.ref(view)
    del view
    assert gone() is None
    assert npu_device.live_storages() == storages


def test_fresh_memory_is_nan(device):
    assert torch.empty(5, device=device).isnan().all()
    assert torch.empty_strided((2, 2), (1, 2), device=device).isnan().all()


def test_a_cpu_tensor_among_device_tensors_raises(device):
    x = torch.ones(3, 3, device=device)
    for mixed in (lambda: x + torch.ones(3, 3), lambda: x @ torch.ones(3, 3), lambda: torch.cat([x, torch.ones(3, 3)])):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    assert (x + torch.tensor(1.0)).sum().item() == 18  # a 0-dim CPU tensor is a number
    assert x[torch.tensor([0, 2])].shape == (2, 3)  # and indices may be on the host, as on CUDA


def test_counters(device):
    x = torch.ones(4, 4, device=device)
    npu_device.reset()
    y = x.t() @ x
    y.add_(1)
    assert npu_device.kernels() == {"mm": 1, "add": 1}
    assert npu_device.synchronisations() == 0
    y.sum().item()
    assert (npu_device.calls["_local_scalar_dense"], npu_device.synchronisations()) == (1, 1)
    y.cpu()
    y[y > 0]
    torch.ones(3).npu()
    assert npu_device.calls["copy_to_host"] == npu_device.calls["nonzero"] == npu_device.calls["copy_to_device"] == 1
    assert npu_device.synchronisations() == 3
    npu_device.reset()
    assert not npu_device.calls


def test_copies_of_a_module(device):
    layer = nn.Linear(3, 2).to(device)
    twin = copy.deepcopy(copy.deepcopy(layer))
    assert twin.weight.device.type == "npu"
    assert twin.weight.data_ptr() != layer.weight.data_ptr()
    assert torch.equal(twin.weight, layer.weight)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["weight"].device.type == "npu"
    assert torch.equal(loaded["weight"], layer.weight)
    file.seek(0)
    assert torch.load(file, map_location="cpu")["bias"].device.type == "cpu"


def test_fake_tensors_and_compile(device):
    from torch._subclasses import FakeTensorMode

    x = torch.randn(4, 6, device=device)
    with FakeTensorMode() as mode:
        y = mode.from_tensor(x) @ torch.empty(6, 3, device=device)
    assert (y.device.type, tuple(y.shape)) == ("npu", (4, 3))

    def function(a):
        return F.dropout((a.t() @ a).softmax(-1), 0.0) * 2

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled(a).square().sum().backward()
    function(b).square().sum().backward()
    torch.testing.assert_close(compiled(x), function(x))
    torch.testing.assert_close(a.grad, b.grad)
