"""The fake torch_npu: the vendor's names, schemas, limits and numbers."""

import pathlib
import re

import npu_contract
import pytest
import torch
import torch.nn.functional as F


def _softmax_inputs(dtype=torch.float32, x_shape=(2, 3, 32, 64), mask_shape=(2, 1, 32, 64)):
    torch.manual_seed(0)
    return torch.randn(x_shape).to(dtype).npu(), (torch.rand(mask_shape) < 0.3).npu()


def test_the_fake_has_the_vendors_names_and_schemas(torch_npu):
    import torch_npu as again

    assert again is torch_npu
    assert torch_npu.__version__ == "2.13.0"
    assert torch_npu.npu is torch.npu
    known = npu_contract.SCHEMAS[torch_npu.__version__]
    for name in {call.op for call in npu_contract.used()}:
        release = torch._C.parse_schema(f"npu::{known[name]}")
        assert str(getattr(torch.ops.npu, name).default._schema) == str(release)


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
