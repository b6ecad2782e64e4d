"""The functions of other libraries that ``benchmarks/peers.py`` calls, by their parameters, and a check of wheels.

``make gpu-wheels`` compares the wheels with it: a name or a parameter that a release has changed is found before a GPU
is lent. Nothing of a wheel is imported: its kernels need a GPU. A test calls what has these parameters.
"""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator
from pathlib import Path

#: By module and function: its parameters, with "=" where they have a default; liger-kernel 0.8.5, quack-kernels 0.2.4.
SIGNATURES = {
    "liger_kernel.ops.softmax": {"LigerSoftmaxFunction.forward": "ctx input_"},
    "liger_kernel.ops.rms_norm": {
        "LigerRMSNormFunction.forward": "ctx X W eps offset= casting_mode= in_place= row_mode=",
    },
    "liger_kernel.ops.fused_add_rms_norm": {
        "LigerFusedAddRMSNormFunction.forward": "ctx X R W eps offset= casting_mode= in_place=",
    },
    "liger_kernel.ops.layer_norm": {"LigerLayerNormFunction.forward": "ctx X W B eps"},
    "liger_kernel.ops.swiglu": {"LigerSiLUMulFunction.forward": "ctx a b gate_multiplier= down_multiplier="},
    "liger_kernel.ops.geglu": {"LigerGELUMulFunction.forward": "ctx a b"},
    "liger_kernel.ops.rope": {"LigerRopeFunction.forward": "ctx q k cos sin position_ids= unsqueeze_dim= rotary_dim="},
    "liger_kernel.ops.fused_linear_cross_entropy": {
        "LigerFusedLinearCrossEntropyFunction.forward": (
            "ctx _input weight target bias= ce_weight= ignore_index= lse_square_scale= label_smoothing= reduction= "
            "softcap= return_z_loss= accum_dtype= use_token_scaling= return_token_accuracy= return_predicted_tokens= "
            "ce_impl= ce_mode= chunk_mem_const="
        ),
    },
    "liger_kernel.transformers.cross_entropy": {
        "LigerCrossEntropyLoss.__init__": (
            "self weight= ignore_index= lse_square_scale= label_smoothing= reduction= softcap= return_z_loss= "
            "return_token_accuracy= return_predicted_tokens="
        ),
        "LigerCrossEntropyLoss.forward": "self _input target",
    },
    "quack.softmax": {"softmax": "x"},
    "quack.rmsnorm": {"rmsnorm": "x weight= bias= residual= out_dtype= residual_dtype= eps= prenorm="},
    "quack.cross_entropy": {"cross_entropy": "x target lse_partial= ignore_index= reduction= inplace_backward="},
    "quack.linear_cross_entropy": {
        "chunked_linear_cross_entropy": "x weight target chunk_size= ignore_index= reduction= tuned=",
    },
}


def differences(wheels: Path) -> Iterator[str]:
    """Return what the wheels of a folder have in another way; a library without a wheel there is left out."""
    files: dict[str, str] = {}
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            paths = {f"{module.replace('.', '/')}.py": module for module in SIGNATURES}
            files |= {paths[name]: archive.read(name).decode() for name in archive.namelist() if name in paths}
    libraries = {module.partition(".")[0] for module in files}
    for module, functions in SIGNATURES.items():
        if module.partition(".")[0] in libraries:
            found = dict(_functions(ast.parse(files.get(module, ""))))
            for name, expected in functions.items():
                if found.get(name) != expected:
                    yield f"{module}.{name}: got parameters {found.get(name)}, expected {expected}"


def _functions(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, _parameters(node.args)
        elif isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
            yield from ((f"{node.name}.{method.name}", _parameters(method.args)) for method in methods)


def _parameters(arguments: ast.arguments) -> str:
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    first = len(names) - len(arguments.defaults)
    return " ".join(f"{name}=" if at >= first else name for at, name in enumerate(names))
