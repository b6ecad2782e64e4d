"""Compiles ahead of time what a launcher would launch, for GPUs that are not there, and prints facts of the results.

Not a test: ``test_triton_compile.py`` runs it in another process, because ``TRITON_INTERPRET``, which the other tests
need, turns every jit function into an interpreted one for the whole process. In here the launchers get meta tensors (a
shape, no memory), and the launch is recorded instead of made; so what is compiled is exactly what a user's call
compiles: the same block, warps, constexprs and divisibilities. It serves any launcher that launches with
``kernel[grid](...)``.

    echo '[{"op": "forward", "shape": [2, 3, 64, 1024], "dtype": "bfloat16", "target": "sm_90"}]' | python triton_aot.py
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from assembly import chained_products, instructions, of_amdgcn, of_cuda
from cache_launches import launch_paged, launch_store
from conv_launches import launch_conv
from expert_launches import launch_experts, launch_packed_experts
from linear_attention_launches import launch_linear_attention
from log_prob_launches import launch_log_probs
from modulated_launches import launch_group_norm, launch_modulated
from overflows import overflows
from quantized_launches import launch_int8, launch_quantized
from sparse_launches import launch_select, launch_sparse
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")


class Launch:
    """One recorded launch: the kernel, its arguments by name, the launch options and the grid."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.kernel = kernel
        self.grid = grid
        self.options = {key: kwargs.pop(key) for key in _OPTIONS if key in kwargs}
        self.arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs

    def source(self, aligned: bool = True) -> ASTSource:
        """Return the source for Triton. ``aligned``: pointers are multiples of 16 bytes, as torch allocates them."""
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attrs: dict[tuple[int, ...], list[list[Any]]] = {}
        for index, parameter in enumerate(self.kernel.params):
            name, value = parameter.name, self.arguments[parameter.name]
            free = not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and free):
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = _TYPES[value.dtype]
                if aligned:
                    attrs[index,] = [["tt.divisibility", 16]]
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0 and free:
                    attrs[index,] = [["tt.divisibility", 16]]
        return ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=attrs)

    def integers(self, source: ASTSource) -> list[int | None]:
        """Return the arguments of the compiled function, None for those that are no integers."""
        names = [name for name, kind in source.signature.items() if kind != "constexpr"]
        return [value if isinstance(value := self.arguments[name], int) else None for name in names]


class Recorder:
    """``with Recorder() as launches``: launches are noted down, not made."""

    def __enter__(self) -> list[Launch]:
        launches: list[Launch] = []

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            launches.append(Launch(kernel, grid, args, kwargs))

        self._run = JITFunction.run
        JITFunction.run = run  # pyright: ignore[reportAttributeAccessIssue]
        return launches

    def __exit__(self, *_: object) -> None:
        JITFunction.run = self._run


def overflow_facts(launch: Launch, target: GPUTarget) -> dict[str, Any]:
    """Make the Triton IR alone, as ``triton.compile`` begins, and read the overflows off it: a twelfth of the time."""
    source, backend, context = launch.source(), make_backend(target), ir.context()
    options, stages = backend.parse_options(launch.options), {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, options, source.language)
    builders = backend.get_codegen_implementation(options), backend.get_module_map()
    module = stages["ttir"](source.make_ir(target, options, *builders, context), {})
    return {"overflows": overflows(str(module), launch.integers(source), launch.grid)}


def compile_launch(launch: Launch, target: str, aligned: bool = True, counted: bool = False) -> dict[str, Any]:
    """Compile, and read the facts off the assembly."""
    options = {name: value for name, value in launch.options.items() if aligned or name != "maxnreg"}  # as launcher.py
    source = launch.source(aligned)
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    facts: dict[str, Any] = {"kernel": launch.kernel.__name__, "warps": launch.options["num_warps"]}
    facts["shared"], facts["chained"] = compiled.metadata.shared, chained_products(compiled.asm["ttir"])
    facts["overflows"] = overflows(compiled.asm["ttir"], launch.integers(source), launch.grid)
    if target.startswith("gfx"):
        return facts | of_amdgcn(compiled.asm["amdgcn"])
    if counted:
        facts["instructions"] = instructions(compiled.asm["cubin"])
    return facts | of_cuda(compiled.asm["ptx"], compiled.asm["cubin"])


def softmax_launch(case: dict[str, Any]) -> Launch:
    """Return the launch of softmax for a case: op, shape, dtype, target, and maybe mask (a shape), causal, on_chip."""
    from fusedops_triton.launch import launcher, settings
    from fusedops_triton.softmax import _softmax

    settings.chip = settings.CHIPS[case["target"]]
    if "on_chip" in case:
        limits = settings.FORWARD_ON_CHIP if case["op"] == "forward" else settings.BACKWARD_ON_CHIP
        limits.update(dict.fromkeys(limits, case["on_chip"]))
    launcher.clear_layout_caches()  # launches depend on both
    x = torch.empty(case["shape"], dtype=getattr(torch, case["dtype"]), device="meta")
    causal = case.get("causal", False)
    with Recorder() as launches:
        if case["op"] == "forward":
            mask = None if case.get("mask") is None else torch.empty(case["mask"], dtype=torch.bool, device="meta")
            _softmax.softmax_forward(x, mask, 0.3, causal)
        else:
            _softmax.softmax_backward(x, x, 0.3, causal)
    (launch,) = launches
    assert math.prod(launch.grid) < 2**31, "more programs than a grid may have"
    return launch


def bias_launch(case: dict[str, Any]) -> Launch:
    """Return an op's first launch. op: a key of ``calls``; shape, dtype, target, and maybe bias (a shape)."""
    from fusedops_triton._jit import _bias
    from fusedops_triton.bias import _bias_dropout, _bias_gelu
    from fusedops_triton.launch import launcher, settings

    settings.chip = settings.CHIPS[case["target"]]
    launcher.clear_layout_caches()  # launches depend on it
    dtype, form = getattr(torch, case["dtype"]), case.get("approximate", "tanh")
    x = torch.empty(case["shape"], dtype=dtype, device="meta")
    bias_shape = case.get("bias", case["shape"][-1:])
    bias = None if bias_shape is None else torch.empty(bias_shape, dtype=dtype, device="meta")
    seed = torch.empty(1, dtype=torch.int64, device="meta")
    both = (True, True)
    calls = {
        "gelu": lambda: _bias_gelu.gelu_forward(x, bias, form),
        "gelu_backward": lambda: _bias_gelu.gelu_backward(x, x, bias, form, both),
        "dropout": lambda: _bias_dropout.dropout_forward(x, bias, None, 0.1, True, seed),
        "dropout_add": lambda: _bias_dropout.dropout_forward(x, bias, x, 0.1, True, seed),
        "dropout_backward": lambda: _bias_dropout.dropout_backward(x, seed, bias, 0.1, True, dtype, both),
        "sums": lambda: _bias.add_sums(bias, x),
    }
    with Recorder() as launches:
        calls[case["op"]]()
    for launch in launches:
        assert math.prod(launch.grid) < 2**31, "more programs than a grid may have"
        assert all(size < 2**16 for size in launch.grid[1:])
    return launches[0]


def norm_launch(case: dict[str, Any]) -> Launch:
    """Return a norm's first launch. op: a norm, or "<norm> backward"; shape, dtype, target, and maybe weight (a dtype),
    on_chip, sums (False: the gradients of the rows alone), launch (another one, by position).
    """
    from fusedops_triton.launch import launcher, settings
    from fusedops_triton.norms import _norm, _norm_backward, _norm_settings

    settings.chip = settings.CHIPS[case["target"]]
    name, _, direction = case["op"].partition(" ")
    if "on_chip" in case:
        limits = _norm_settings.NORM_BACKWARD_ON_CHIP if direction else _norm_settings.NORM_FORWARD_ON_CHIP
        limits.update(dict.fromkeys(limits, case["on_chip"]))
    launcher.clear_layout_caches()  # launches depend on both
    dtype = getattr(torch, case["dtype"])
    x = torch.empty(case["shape"], dtype=dtype, device="meta")
    weight = torch.empty(case["shape"][-1:], dtype=getattr(torch, case.get("weight", case["dtype"])), device="meta")
    rstd = torch.empty(case["shape"][:-1], dtype=torch.promote_types(dtype, torch.float32), device="meta")
    centered, adds = name.endswith("layer_norm"), name.startswith("add")
    bias, mean, residual = weight if centered else None, rstd if centered else None, x if adds else None
    with Recorder() as launches:
        if direction:
            vectors = (weight, bias) if case.get("sums", True) else (None, None)
            dtypes = (dtype, dtype) if adds else (dtype,)
            _norm_backward.norm_backward(x, residual, x, mean, rstd, weight, 0.0, dtypes, vectors)
        else:
            _norm.norm_forward(x, residual, weight, bias, 1e-6, 0.0, centered, True)
    for launch in launches:
        assert math.prod(launch.grid) < 2**31, "more programs than a grid may have"
        assert all(size < 2**16 for size in launch.grid[1:])
    return launches[case.get("launch", 0)]


def gated_norm_launch(case: dict[str, Any]) -> Launch:
    """Return the first launch of gated_rms_norm, or of its backward. op: it, or with " backward"; shape, dtype, target,
    and maybe gate_first, sigmoid, groups, sums (False: the gradients of x and gate alone).
    """
    from fusedops_triton.launch import launcher, settings
    from fusedops_triton.norms import _gated_norm

    settings.chip = settings.CHIPS[case["target"]]
    launcher.clear_layout_caches()  # launches depend on it
    x = torch.empty(case["shape"], dtype=getattr(torch, case["dtype"]), device="meta")
    weight, groups = x.new_empty(case["shape"][-1:]), case.get("groups", 1)
    options = _gated_norm.GatedNorm(case.get("gate_first", False), not case.get("sigmoid"), groups, 0.0)
    with Recorder() as launches:
        if case["op"].endswith("backward"):
            rstd = x.new_empty((*x.shape[:-1], groups), dtype=torch.promote_types(x.dtype, torch.float32))
            needs = (True, True, case.get("sums", True))
            _gated_norm.gated_norm_backward(x, x, x, rstd, weight, options, needs)
        else:
            _gated_norm.gated_norm_forward(x, x, weight, 1e-6, options, True)
    for launch in launches:
        assert launch.grid[0] < 2**31
        assert all(size < 2**16 for size in launch.grid[1:])
    return launches[0]


def merge_launch(case: dict[str, Any]) -> Launch:
    """Return the launch of merge_attention, or of its backward. op: it, or with " backward"; shape, dtype, target."""
    from fusedops_triton.attention import _merge
    from fusedops_triton.launch import launcher, settings

    settings.chip = settings.CHIPS[case["target"]]
    launcher.clear_layout_caches()  # launches depend on it
    out = torch.empty(case["shape"], dtype=getattr(torch, case["dtype"]), device="meta").transpose(1, 2)
    lse = torch.empty(out.shape[:-1], dtype=torch.promote_types(out.dtype, torch.float32), device="meta")
    with Recorder() as launches:
        if case["op"].endswith("backward"):
            _merge.merge_backward(out, lse, out, lse, out, lse, (True, case.get("sums", True), True, True))
        else:
            _merge.merge_forward(out, lse, out, lse)
    (launch,) = launches
    assert launch.grid[0] < 2**31
    return launch


def modern_launch(case: dict[str, Any]) -> Launch:
    """Return the launch of an op without a bias: a key of ``calls``; shape of the output, dtype, target."""
    from fusedops_triton.gated import _gated
    from fusedops_triton.launch import launcher, settings

    settings.chip = settings.CHIPS[case["target"]]
    launcher.clear_layout_caches()  # launches depend on it
    *lead, width = case["shape"]

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, case["dtype"]), device="meta")

    y, packed, both = empty(*lead, width), empty(*lead, 2 * width), (True, True)
    function = _gated.Swish(case.get("limit"), 1.702, 1.0) if "swiglu" in case["op"] else _gated.Gelu("erf")
    calls = {
        "": lambda: _gated.gated_forward(y, y, function, False),
        "_backward": lambda: _gated.gated_backward(y, y, y, function, False, both),
        "_halves": lambda: _gated.gated_forward(packed, None, function, False),
        "_halves_backward": lambda: _gated.gated_backward(y, packed, None, function, False, both),
        "_pairs": lambda: _gated.gated_forward(packed, None, function, True),
        "_pairs_backward": lambda: _gated.gated_backward(y, packed, None, function, True, both),
    }
    with Recorder() as launches:
        calls[case["op"].removeprefix("swiglu").removeprefix("geglu")]()
    (launch,) = launches
    assert math.prod(launch.grid) < 2**31, "more programs than a grid may have"
    return launch


def rotary_launch(case: dict[str, Any]) -> Launch:
    """Return the launch of rotary_embedding. op: it, or with " backward"; q, maybe k and cos (shapes), dtype, angles
    (the dtype of cos), target, and maybe interleaved and seq_dim.
    """
    from fusedops_triton.launch import launcher, settings
    from fusedops_triton.rotary import _rotary

    settings.chip = settings.CHIPS[case["target"]]
    launcher.clear_layout_caches()  # launches depend on it
    q = torch.empty(case["q"], dtype=getattr(torch, case["dtype"]), device="meta")
    k = torch.empty(case["k"], dtype=q.dtype, device="meta") if case.get("k") else None
    cos = torch.empty(case["cos"], dtype=getattr(torch, case.get("angles", case["dtype"])), device="meta")
    forward, layout = "backward" not in case["op"], case.get("seq_dim", -2)
    with Recorder() as launches:
        _rotary.rotate(q, k, cos, cos, case.get("interleaved", False), layout, forward)
    (launch,) = launches
    assert math.prod(launch.grid) < 2**31, "more programs than a grid may have"
    return launch


def classes_launch(case: dict[str, Any]) -> Launch:
    """Return the launch of linear_cross_entropy's kernel: shape of the logits, dtype, target, and maybe gradient,
    bias, options (False: neither smoothing nor z-loss nor softcap).
    """
    from fusedops.ops.losses.formulas import LossOptions
    from fusedops_triton.launch import launcher, settings
    from fusedops_triton.losses import _linear_cross_entropy

    settings.chip = settings.CHIPS[case["target"]]
    launcher.clear_layout_caches()  # launches depend on it
    (rows, classes), dtype = case["shape"], getattr(torch, case["dtype"])
    wide, padded = torch.promote_types(dtype, torch.float32), -(-classes // 16) * 16
    logits = torch.empty((rows, padded), dtype=dtype, device="meta")[:, :classes]
    losses = torch.empty(rows, dtype=wide, device="meta")
    target = torch.empty(rows, dtype=torch.int64, device="meta")
    bias = torch.empty(padded, dtype=wide, device="meta") if case.get("bias") else None
    numbers = (0.1, 1e-4, 30.0) if case.get("options", True) else (0.0, 0.0, None)
    options = LossOptions(-100, *numbers, "mean", None)
    with Recorder() as launches:
        _linear_cross_entropy.loss_rows(
            logits,
            padded,
            losses,
            target,
            losses if case.get("scale") else None,
            bias,
            options,
            case.get("gradient", True),
        )
    (launch,) = launches
    return launch


def loss_launch(case: dict[str, Any]) -> Launch:
    """Return the launch of cross entropy. op: "cross_entropy" or "cross_entropy backward"; shape, dtype, target, and
    maybe options (True: smoothing and softcap), padded (the columns of the memory that the logits are cut out of).
    """
    from fusedops.ops.losses.formulas import LossOptions
    from fusedops_triton.launch import launcher, settings
    from fusedops_triton.losses import _cross_entropy

    settings.chip = settings.CHIPS[case["target"]]
    launcher.clear_layout_caches()  # launches depend on it
    *lead, width = case["shape"]
    dtype = getattr(torch, case["dtype"])
    logits = torch.empty((*lead, case.get("padded", width)), dtype=dtype, device="meta")[..., :width]
    target = torch.empty(lead, dtype=torch.int64, device="meta")
    lse = torch.empty(lead, dtype=torch.promote_types(dtype, torch.float32), device="meta")
    both = case.get("options", False)
    options = LossOptions(-100, 0.1 if both else 0.0, 0.01, 30.0 if both else None, "mean", None)
    with Recorder() as launches:
        if case["op"].endswith("backward"):
            _cross_entropy.logits_gradient(lse.flatten()[0], logits, lse, target, options)
        else:
            _cross_entropy.cross_entropy_forward(logits, target, options, True)
    for launch in launches:
        assert math.prod(launch.grid) < 2**31, "more programs than a grid may have"
    (rows,) = (launch for launch in launches if launch.kernel.__name__ != "_sum_rows")
    return rows


def routing_launch(case: dict[str, Any]) -> Launch:
    """Return the launch of top_k_routing. op: "top_k_routing" or "top_k_routing backward"; shape, dtype, target, k, and
    maybe score, bias, groups, top_groups, given.
    """
    from fusedops_triton.launch import launcher, settings
    from fusedops_triton.routing import _routing

    settings.chip = settings.CHIPS[case["target"]]
    launcher.clear_layout_caches()  # launches depend on it
    logits = torch.empty(case["shape"], dtype=getattr(torch, case["dtype"]), device="meta")
    chosen = torch.empty((*case["shape"][:-1], case["k"]), dtype=torch.int64, device="meta")
    score = case.get("score", "softmax")
    with Recorder() as launches:
        if case["op"].endswith("backward"):
            grad = torch.empty(chosen.shape, dtype=torch.promote_types(logits.dtype, torch.float32), device="meta")
            _routing.routing_backward(grad, logits, chosen, case["k"], score, True, 1e-20, 2.5)
        else:
            groups = case.get("groups", 1), case.get("top_groups", 1), case.get("group_score", "top2")
            options = _routing.Routing(case["k"], score, *groups, True, 1e-20, 2.5)
            bias = torch.empty(case["shape"][-1:], device="meta") if case.get("bias") else None
            _routing.routing_forward(logits, bias, chosen if case.get("given") else None, options)
    (launch,) = launches
    return launch


def sample_launch(case: dict[str, Any]) -> Launch:
    """Return the launch of sample. shape, dtype, target, and maybe filters, mask, log_prob."""
    from fusedops.ops.sampling.arguments import SampleArgs
    from fusedops_triton.launch import launcher, settings
    from fusedops_triton.sampling import _sample

    settings.chip = settings.CHIPS[case["target"]]
    launcher.clear_layout_caches()  # launches depend on it
    logits = torch.empty(case["shape"], dtype=getattr(torch, case["dtype"]), device="meta")
    number, integer = (logits.new_empty(case["shape"][:-1], dtype=each) for each in (torch.float32, torch.int64))
    filters = (number, integer, number, number) if case.get("filters") else (None,) * 4
    mask = logits.new_empty(case["shape"][-1:], dtype=torch.bool) if case.get("mask") else None
    with Recorder() as launches:
        _sample.sample(SampleArgs(logits, *filters, integer, integer, mask, case.get("log_prob", "none")))
    (launch,) = launches
    return launch


def recorded_launch(case: dict[str, Any], launch: Callable[[dict[str, Any]], None]) -> Launch:
    """Return a launch of a function that makes those of a case: the first one, or number ``launch`` of the case."""
    from fusedops_triton.launch import launcher, settings

    settings.chip = settings.CHIPS[case["target"]]
    launcher.clear_layout_caches()  # launches depend on it
    with Recorder() as launches:
        launch(case)
    for each in launches:
        assert math.prod(each.grid) < 2**31, "more programs than a grid may have"
    return launches[case.get("launch", 0)]


#: The ops of ``modern_launch``.
MODERN = ("swiglu", "geglu")


def launch_of(case: dict[str, Any]) -> Launch:
    """Return the launch of a case."""
    if case["op"] in ("forward", "backward"):
        return softmax_launch(case)
    if case["op"] == "classes":
        return classes_launch(case)
    if case["op"].startswith("cross_entropy"):
        return loss_launch(case)
    if case["op"].startswith("experts"):
        return recorded_launch(case, launch_experts)
    if case["op"].startswith("packed_experts"):
        return recorded_launch(case, launch_packed_experts)
    if case["op"].startswith("causal_conv1d"):
        return recorded_launch(case, launch_conv)
    if case["op"].startswith("linear_log_probs"):
        return recorded_launch(case, launch_log_probs)
    if case["op"].startswith("quantized_linear"):
        return recorded_launch(case, launch_quantized)
    if case["op"] == "int8_linear":
        return recorded_launch(case, launch_int8)
    if case["op"].startswith("modulated"):
        return recorded_launch(case, launch_modulated)
    if case["op"].startswith("group_norm"):
        return recorded_launch(case, launch_group_norm)
    if case["op"].startswith("linear_attention"):
        return recorded_launch(case, launch_linear_attention)
    if case["op"] == "paged_attention":
        return recorded_launch(case, launch_paged)
    if case["op"] == "store_kv":
        return recorded_launch(case, launch_store)
    if case["op"] == "select_keys":
        return recorded_launch(case, launch_select)
    if case["op"].startswith("sparse_attention"):
        return recorded_launch(case, launch_sparse)
    if case["op"] == "sample":
        return sample_launch(case)
    if case["op"].startswith("top_k_routing"):
        return routing_launch(case)
    if case["op"].startswith("rotary_embedding"):
        return rotary_launch(case)
    if case["op"].startswith("gated_rms_norm"):
        return gated_norm_launch(case)
    if case["op"].startswith("merge_attention"):
        return merge_launch(case)
    if "norm" in case["op"]:
        return norm_launch(case)
    return modern_launch(case) if case["op"].startswith(MODERN) else bias_launch(case)


def facts_of(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the facts of the kernel of each case, with its instructions where it has the most that it may have, and
    none but its overflows where these are all that is asked for.
    """
    return [
        overflow_facts(launch_of(case), TARGETS[case["target"]])
        if case.get("overflows")
        else compile_launch(launch_of(case), case["target"], case.get("aligned", True), "most" in case)
        for case in cases
    ]


if __name__ == "__main__":
    for _case in json.load(sys.stdin):
        print(json.dumps({"case": _case, "facts": facts_of([_case])[0]}), flush=True)
