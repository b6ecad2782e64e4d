"""The stand-in for an Ascend machine keeps its own promises: the device, the fake torch_npu, and leaving no trace.

What the library does with them is tested elsewhere.
"""

import copy
import gc
import importlib
import importlib.util
import io
import pathlib
import re
import subprocess
import sys
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.standin import absent, broken, installed, no_device, npu_device


@pytest.fixture
def torch_npu():
    with installed() as module:
        yield module


@pytest.fixture
def device():
    with installed():
        yield torch.device("npu")


# The device ---------------------------------------------------------------------------------------------------------


def test_tensors_are_plain_tensors_on_npu_0(device):
    x = torch.randn(3, 4)
    y = x.to(device)
    assert type(y) is torch.Tensor
    assert (str(y.device), y.is_npu, y.dtype) == ("npu:0", True, torch.float32)
    assert type(y.transpose(0, 1)) is type(y + 1) is type(y.requires_grad_().sin()) is torch.Tensor
    assert y.device == torch.empty(0, device="npu").device == x.npu().device
    torch.testing.assert_close(y.cpu(), x, rtol=0, atol=0)


def test_torch_npu_module(device):
    assert torch.npu.is_available()
    assert torch.npu.device_count() == 1
    assert torch.npu.current_device() == 0
    torch.npu.synchronize()
    assert npu_device.calls["synchronize"] == 1


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


class GPT(nn.Module):
    """Two layers, of the usual parts."""

    def __init__(self, vocabulary=17, width=16, heads=2, length=8):
        super().__init__()
        self.heads = heads
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "norm2": nn.LayerNorm(width),
                    "mlp": nn.Sequential(
                        nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
                    ),
                }
            )
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        batch, length = ids.shape
        x = self.tokens(ids) + self.places(torch.arange(length, device=ids.device))
        masked = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        for block in self.blocks:
            q, k, v = block["qkv"](block["norm1"](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(masked, float("-inf"))
            x = x + block["out"]((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1))
            x = x + block["mlp"](block["norm2"](x))
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
        lambda p: torch.optim.AdamW(p, lr=1e-2),
        lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, foreach=False),
    ],
)
def test_a_gpt_trains_as_on_the_cpu(device, optimizer):
    torch.manual_seed(0)
    start, ids = GPT(), torch.randint(17, (4, 9))
    histories = []
    for place in ("cpu", device):
        model = copy.deepcopy(start).to(place)
        batch, history, steps = ids.to(place), [], optimizer(model.parameters())
        for _ in range(5):
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            steps.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            steps.step()
            history.append(loss.item())
        histories.append(history)
    assert histories[0][-1] < histories[0][0]
    assert histories[1] == pytest.approx(histories[0], rel=1e-5)


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


# The fake torch_npu -------------------------------------------------------------------------------------------------


def _softmax_inputs(dtype=torch.float32, x_shape=(2, 3, 32, 64), mask_shape=(2, 1, 32, 64)):
    torch.manual_seed(0)
    return torch.randn(x_shape).to(dtype).npu(), (torch.rand(mask_shape) < 0.3).npu()


def test_the_fake_has_the_vendors_names_and_schemas(torch_npu):
    import torch_npu as again

    assert again is torch_npu
    assert torch_npu.__version__ == "2.13.0"
    assert torch_npu.npu is torch.npu
    schemas = [str(getattr(torch.ops.npu, name).default._schema) for name in ("npu_scaled_masked_softmax", "npu_gelu")]
    assert schemas == [
        "npu::npu_scaled_masked_softmax(Tensor x, Tensor mask, Scalar scale=1, bool fixed_triu_mask=False) -> Tensor",
        'npu::npu_gelu(Tensor self, *, str approximate="none") -> Tensor',
    ]
    assert str(torch.ops.npu.npu_scaled_masked_softmax_backward.default._schema) == (
        "npu::npu_scaled_masked_softmax_backward("
        "Tensor y_grad, Tensor y, Tensor mask, Scalar scale, bool fixed_triu_mask) -> Tensor"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scaled_masked_softmax_of_ordinary_values(torch_npu, dtype):
    x, mask = _softmax_inputs(dtype)
    x.requires_grad_()
    y = torch_npu.npu_scaled_masked_softmax(x, mask, 0.5, False)
    g = torch.randn(x.shape).to(dtype).npu()
    (dx,) = torch.autograd.grad(y, x, g)

    reference = x.detach().cpu().float().requires_grad_()
    expected = torch.softmax((reference * 0.5).masked_fill(mask.cpu(), -10000.0), -1)
    (expected_dx,) = torch.autograd.grad(expected, reference, g.cpu().float())
    assert y.dtype == dx.dtype == dtype
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(y.detach().cpu().float(), expected.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(dx.cpu().float(), expected_dx, rtol=tolerance, atol=tolerance)
    assert [call.name for call in torch_npu.calls] == [
        "npu_scaled_masked_softmax",
        "npu_scaled_masked_softmax_backward",
    ]
    assert torch_npu.calls[0].shapes == ((2, 3, 32, 64), (2, 1, 32, 64))
    assert torch_npu.calls[0].dtypes == (dtype, torch.bool)
    assert torch_npu.calls[0].options == {"scale": 0.5, "fixed_triu_mask": False}
    assert npu_device.calls["npu_scaled_masked_softmax"] == 1


@pytest.mark.parametrize(
    ("x_shape", "mask_shape"),
    [((1, 1, 32, 4096), (1, 1, 32, 4096)), ((2, 3, 64, 32), (1, 3, 64, 32)), ((2, 3, 32, 96), (2, 3, 32, 96))],
)
def test_shapes_within_the_limits_pass(torch_npu, x_shape, mask_shape):
    x, mask = _softmax_inputs(x_shape=x_shape, mask_shape=mask_shape)
    assert torch_npu.npu_scaled_masked_softmax(x, mask).shape == x_shape


def _refused(change, sentence):
    return pytest.param(change, sentence, id=sentence)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        _refused(lambda x, m: (x[0], m), "x must have 4 dimensions; it has 3"),
        _refused(lambda x, m: (x[None], m), "x must have 4 dimensions; it has 5"),
        _refused(lambda x, m: (x.double(), m), "x must be float16, bfloat16 or float32; it is torch.float64"),
        _refused(lambda x, m: (x[:, :, :31], m), "dimension 2 of x must be within [32, 4096]; it is 31"),
        _refused(lambda x, m: (x[..., :16], m), "dimension 3 of x must be within [32, 4096]; it is 16"),
        _refused(lambda x, m: (x[..., :33], m), "dimension 3 of x must be divisible by 32; it is 33"),
        _refused(
            lambda x, m: (x[..., :1].expand(-1, -1, -1, 4128), m),
            "dimension 3 of x must be within [32, 4096]; it is 4128",
        ),
        _refused(lambda x, m: (x, m.to(torch.uint8)), "mask must be bool; it is torch.uint8"),
        _refused(lambda x, m: (x, m.float()), "mask must be bool; it is torch.float32"),
        _refused(lambda x, m: (x, m[0]), "mask must have 4 dimensions; it has 3"),
        _refused(lambda x, m: (x, m[:, :, :1]), "the last two dimensions of mask must equal those of x"),
        _refused(lambda x, m: (x, m.expand(-1, 2, -1, -1)), "dimension 1 of mask must be 1 or 3; it is 2"),
        _refused(lambda x, m: (x, m.repeat(2, 1, 1, 1)), "dimension 0 of mask must be 1 or 2; it is 4"),
        _refused(lambda x, m: (x, m.cpu()), "mask must be on an npu device; it is on cpu"),
        _refused(lambda x, m: (x, None), "mask is required"),
        _refused(lambda x, m: (x, m, 1.0, True), "fixed_triu_mask must be False"),
        _refused(lambda x, m: (x, m, torch.tensor(0.5)), "Expected a value of type 'number' for argument 'scale'"),
        _refused(lambda x, m: (x.cpu(), m.cpu()), "Could not run 'npu::npu_scaled_masked_softmax'"),
    ],
)
def test_each_rule_of_scaled_masked_softmax(torch_npu, change, sentence):
    arguments = change(*_softmax_inputs())
    with pytest.raises(RuntimeError) as caught:
        torch_npu.npu_scaled_masked_softmax(*arguments)
    assert sentence in str(caught.value)
    assert not torch_npu.calls


def test_every_rule_names_its_source(torch_npu):
    lines = pathlib.Path(torch_npu.__file__).read_text().splitlines()
    known = re.findall(r"^\* ([DR]\d|V):", torch_npu.__doc__, re.M)
    rules = [at for at, line in enumerate(lines) if "_refuse(" in line and "def " not in line]
    assert len(rules) >= 12
    for at in rules:
        above = [line for line in lines[at - 5 : at] if line.lstrip().startswith("#")]
        assert any(re.search(rf"# ({'|'.join(known)})\b", line) for line in above), lines[at]


def test_the_rules_hold_for_the_backward_too(torch_npu):
    x, mask = _softmax_inputs()
    backward = torch_npu.npu_scaled_masked_softmax_backward
    for arguments, sentence in [
        ((x, x[0], mask, 1.0, False), "y must have 4 dimensions"),
        ((x[:1], x, mask, 1.0, False), "y_grad must have the shape and dtype of y"),
        ((x.half(), x, mask, 1.0, False), "y_grad must have the shape and dtype of y"),
        ((x.cpu(), x, mask, 1.0, False), "y_grad must be on an npu device"),
        ((x, x, mask.float(), 1.0, False), "mask must be bool"),
        ((x, x, mask, 1.0, True), "fixed_triu_mask must be False"),
    ]:
        with pytest.raises(RuntimeError, match=sentence):
            backward(*arguments)


def test_a_fully_masked_row_is_uniform(torch_npu):
    x, mask = _softmax_inputs()
    mask[0, 0, 5] = True
    y = torch_npu.npu_scaled_masked_softmax(x, mask, 0.5)
    assert torch.equal(y[0, :, 5].cpu(), torch.full((3, 64), 1 / 64))


def test_valid_logits_below_the_fill_lose(torch_npu):
    x, mask = _softmax_inputs()
    y = torch_npu.npu_scaled_masked_softmax(torch.full_like(x, -20000.0), mask)
    assert y.cpu().masked_select(~mask.cpu().expand_as(y)).max() < 1e-6


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_masked_inf_or_nan_leaks_into_its_row(torch_npu, value):
    x, mask = _softmax_inputs()
    x[0, 1, 7, 3] = value
    mask[0, 0, 7, 3] = True
    y = torch_npu.npu_scaled_masked_softmax(x, mask).cpu()
    bad = y.isnan().any(-1)
    assert bad.sum() == 1
    assert bad[0, 1, 7]
    g = torch.ones_like(x)
    g[0, 1, 7, 3] = value
    dx = torch_npu.npu_scaled_masked_softmax_backward(g, torch.full_like(x, 1 / 64), mask, 1.0, False).cpu()
    assert dx[0, 1, 7, 3].isnan()


def test_float16_is_scaled_in_float16(torch_npu):
    x, mask = _softmax_inputs(torch.float16)
    mask[..., 0] = False  # at least one valid position a row
    x.fill_(300.0)
    assert torch_npu.npu_scaled_masked_softmax(x, mask, 1000.0).isnan().all()
    for wide in (torch.bfloat16, torch.float32):
        assert not torch_npu.npu_scaled_masked_softmax(x.to(wide), mask, 1000.0).isnan().any()


def test_meta_functions_check_nothing(torch_npu):
    anything = torch.empty(3, dtype=torch.float64, device="meta")
    assert torch_npu.npu_scaled_masked_softmax(anything, anything, 2, True).shape == (3,)
    assert torch_npu.npu_scaled_masked_softmax_backward(anything, anything, anything, 2, True).shape == (3,)


def test_the_softmax_in_a_compiled_function(torch_npu):
    x, mask = _softmax_inputs()
    x.requires_grad_()
    compiled = torch.compile(
        lambda a, m: torch_npu.npu_scaled_masked_softmax(a * 2, m, 0.5), backend="aot_eager", fullgraph=True
    )
    y = compiled(x, mask)
    y.square().sum().backward()
    assert torch.equal(y, torch_npu.npu_scaled_masked_softmax(x * 2, mask, 0.5))
    assert [call.name for call in torch_npu.calls][:2] == [
        "npu_scaled_masked_softmax",
        "npu_scaled_masked_softmax_backward",
    ]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_npu_gelu(torch_npu, approximate):
    x = torch.linspace(-4, 4, 101, device="npu", requires_grad=True)
    y = torch_npu.npu_gelu(x, approximate=approximate)
    y.sum().backward()
    reference = x.detach().cpu().requires_grad_()
    expected = F.gelu(reference, approximate=approximate)
    expected.sum().backward()
    torch.testing.assert_close(y.detach().cpu(), expected.detach())
    torch.testing.assert_close(x.grad.cpu(), reference.grad)
    assert [(call.name, call.options) for call in torch_npu.calls] == [
        ("npu_gelu", {"approximate": approximate}),
        ("npu_gelu_backward", {"approximate": approximate}),
    ]


def test_each_rule_of_npu_gelu(torch_npu):
    x = torch.ones(3, device="npu")
    for call, sentence in [
        (lambda: torch_npu.npu_gelu(x, approximate="erf"), "approximate must be 'none' or 'tanh'"),
        (lambda: torch_npu.npu_gelu(x.double()), "must be float16, bfloat16 or float32"),
        (lambda: torch_npu.npu_gelu(x.view((1,) * 8 + (3,))), "at most 8 dimensions"),
        (lambda: torch_npu.npu_gelu(x.cpu()), "Could not run 'npu::npu_gelu'"),
        (lambda: torch_npu.npu_gelu_backward(x.cpu(), x), "grad_output must be on an npu device"),
        (lambda: torch_npu.npu_gelu(x, "tanh"), "takes 1 positional argument"),
    ]:
        with pytest.raises(RuntimeError, match=sentence):
            call()


def test_torchs_own_gelu_is_always_tanh_on_the_device(device):
    x = torch.linspace(-4, 4, 101)
    for approximate in ("none", "tanh"):
        y = x.to(device).requires_grad_()
        z = F.gelu(y, approximate=approximate)
        z.sum().backward()
        reference = x.clone().requires_grad_()
        expected = F.gelu(reference, approximate="tanh")
        expected.sum().backward()
        assert torch.equal(z.detach().cpu(), expected.detach())
        assert torch.equal(y.grad.cpu(), reference.grad)


# What `import torch_npu` gives, and leaving no trace ----------------------------------------------------------------


def _vendors_modules():
    return {name for name in sys.modules if name == "torch_npu" or name.startswith("torch_npu.")}


def test_installed_can_be_entered_again_and_leaves_no_module():
    path, before = sys.path[:], _vendors_modules()
    with installed() as first:
        first.npu_gelu(torch.ones(2, device="npu"))
        with installed() as inner:
            assert inner is first
        assert importlib.import_module("torch_npu") is first
    assert (sys.path, _vendors_modules()) == (path, before)
    with installed() as second:
        assert second is first
        assert not second.calls


def test_no_device():
    with installed(), no_device():
        assert not torch.npu.is_available()
        assert torch.npu.device_count() == 0
    assert torch.npu.is_available()


def test_absent():
    with installed(), absent():
        assert importlib.util.find_spec("torch_npu") is None
        assert not hasattr(torch, "npu")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("torch_npu")
        torch.manual_seed(0)
    assert torch.npu.is_available()


@pytest.mark.parametrize(
    "error", [ImportError("libhccl.so: cannot open shared object file"), RuntimeError("CUDA build")]
)
def test_broken(error):
    before = _vendors_modules()
    with broken(error):
        assert importlib.util.find_spec("torch_npu") is not None
        for _ in range(2):
            with pytest.raises(type(error), match=str(error)):
                importlib.import_module("torch_npu")
        assert "torch_npu" not in sys.modules
        assert "torch_npu.version" in sys.modules
    assert _vendors_modules() == before


def test_the_cpu_is_undisturbed(device):
    x = torch.randn(6, 6, requires_grad=True)
    npu_device.reset()
    results = []

    def work():
        a = x.detach().clone().requires_grad_()
        a.exp().sum().backward()
        results.append(torch.equal(a.grad, x.detach().exp()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4

    compiled = torch.compile(lambda a: (a @ a).softmax(-1), backend="aot_eager", fullgraph=True)
    (dx,) = torch.autograd.grad(compiled(x).square().sum(), x)
    (expected,) = torch.autograd.grad((x @ x).softmax(-1).square().sum(), x)
    torch.testing.assert_close(dx, expected)

    torch.manual_seed(5)
    a = torch.rand(3)
    torch.manual_seed(5)
    torch.rand(3, device=device)
    assert torch.equal(a, torch.rand(3))
    torch.testing.assert_close(F.gelu(x), x * 0.5 * (1 + torch.erf(x / 2**0.5)))  # erf, where the device has tanh
    assert not (set(npu_device.calls) - {"empty", "uniform"})


def test_backward_on_several_threads(device):
    if npu_device.registered_late:
        pytest.skip("a backward ran before the device was registered: call npu_device.register() in a conftest")
    results = []

    def work():
        a = torch.arange(5.0, device=device).requires_grad_()
        (a * a).sum().backward()
        results.append(a.grad.tolist())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[0.0, 2.0, 4.0, 6.0, 8.0]] * 4


def test_one_module_under_both_names():
    for name in ("standin", "tests.standin"):
        assert importlib.import_module(name).npu_device is importlib.import_module(f"{name}.npu_device") is npu_device


def test_registered_after_a_backward():
    script = """
import torch
torch.ones(3, requires_grad=True).sum().backward()
from tests.standin import installed, npu_device
with installed():
    x = torch.ones(3, device="npu", requires_grad=True)
    (x * x).sum().backward()
    print(npu_device.registered_late, x.grad.tolist())
"""
    root = pathlib.Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "[2.0,", "2.0,", "2.0]"], done.stderr
