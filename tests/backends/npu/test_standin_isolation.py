"""The stand-in leaves no trace: modules, devices, threads."""

import importlib
import importlib.util
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from repository import ROOT

from tests.standin import absent, broken, installed, no_device, npu_device


def test_torch_npu_module(device):
    assert torch.npu.is_available()
    assert torch.npu.device_count() == 1
    assert torch.npu.current_device() == 0
    torch.npu.synchronize()
    assert npu_device.calls["synchronize"] == 1


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


def test_registered_after_a_backward(program):
    script = """
import torch
torch.ones(3, requires_grad=True).sum().backward()
from tests.standin import installed, npu_device
with installed():
    x = torch.ones(3, device="npu", requires_grad=True)
    (x * x).sum().backward()
    print(npu_device.registered_late, x.grad.tolist())
"""
    done = program("-c", script, path=[ROOT, ROOT / "backends"], folder=ROOT)
    assert done.stdout.split() == ["True", "[2.0,", "2.0,", "2.0]"], done.stderr
