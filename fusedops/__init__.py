"""One set of fused transformer operations. Each call is served by the best backend; a fallback is always reported.

>>> import torch, fusedops
>>> y = fusedops.scaled_masked_softmax(torch.randn(2, 4, 8, 8), scale=0.125, causal=True)
>>> decision = fusedops.explain("scaled_masked_softmax", torch.randn(2, 4, 8, 8), None, 0.125)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fusedops._collector import paused

with paused():
    from fusedops import dtypes as dtypes
    from fusedops import errors as errors
    from fusedops import masks as masks
    from fusedops import ops as ops
    from fusedops import quantization as quantization
    from fusedops._contract.op import Op as Op
    from fusedops._contract.tensor_spec import TensorSpec as TensorSpec
    from fusedops._contract.values import Output as Output
    from fusedops._contract.values import Padding as Padding
    from fusedops._contract.values import Saved as Saved
    from fusedops._contract.values import Shard as Shard
    from fusedops._contract.values import Sharding as Sharding
    from fusedops._dispatch.call import call as call
    from fusedops._policy.context import get_policy as get_policy
    from fusedops._policy.policy import Policy as Policy
    from fusedops._policy.use import checkpoint_contexts as checkpoint_contexts
    from fusedops._policy.use import set_policy as set_policy
    from fusedops._policy.use import use as use
    from fusedops._version import __version__ as __version__
    from fusedops.errors import FallbackWarning as FallbackWarning
    from fusedops.errors import FusedOpsError as FusedOpsError
    from fusedops.errors import FusedOpsWarning as FusedOpsWarning
    from fusedops.errors import InvalidInputError as InvalidInputError
    from fusedops.errors import MismatchError as MismatchError
    from fusedops.errors import NoBackendError as NoBackendError
    from fusedops.errors import PluginError as PluginError
    from fusedops.errors import PolicyError as PolicyError
    from fusedops.ops import *  # noqa: F403  # every op, so that a new one needs no line here

if TYPE_CHECKING:
    from fusedops import compat as compat
    from fusedops import constraints as constraints
    from fusedops import integrations as integrations
    from fusedops import losses as losses
    from fusedops import nn as nn
    from fusedops import philox as philox
    from fusedops import tensor_cache as tensor_cache
    from fusedops import testing as testing
    from fusedops import viewless as viewless
    from fusedops._bind import bind as bind
    from fusedops._contract.backend import API_VERSION as API_VERSION
    from fusedops._contract.backend import Backend as Backend
    from fusedops._contract.backend import Unavailable as Unavailable
    from fusedops._contract.device_spec import DeviceSpec as DeviceSpec
    from fusedops._contract.evidence import Case as Case
    from fusedops._contract.evidence import Evidence as Evidence
    from fusedops._contract.evidence import Rows as Rows
    from fusedops._contract.evidence import Tolerance as Tolerance
    from fusedops._contract.kernel import Adaptation as Adaptation
    from fusedops._contract.kernel import Deviation as Deviation
    from fusedops._contract.kernel import Kernel as Kernel
    from fusedops._contract.kernel import Replay as Replay
    from fusedops._contract.kernel import kernel as kernel
    from fusedops._contract.kernel import kernels_of as kernels_of
    from fusedops._dispatch.selection.stats import reset_stats as reset_stats
    from fusedops._dispatch.selection.stats import stats as stats
    from fusedops._explain import explain as explain
    from fusedops._plan.plan import plan as plan
    from fusedops._plan.report import Plan as Plan
    from fusedops._plugins.hookspecs import hookimpl as hookimpl
    from fusedops._plugins.registration import BackendInfo as BackendInfo
    from fusedops._plugins.registration import backends as backends
    from fusedops._plugins.registration import register as register
    from fusedops._plugins.registration import unregister as unregister
    from fusedops._report.decision import Decision as Decision
    from fusedops._report.event import Event as Event
    from fusedops._report.event import Stats as Stats
    from fusedops._report.mismatch import Mismatch as Mismatch
    from fusedops._report.mismatch import Verification as Verification
    from fusedops._verify.verify import verify as verify
    from fusedops._warm_up import warm_up as warm_up
    from fusedops.ops.sampling.formulas import accept as accept
    from fusedops.viewless import MakeViewlessTensor as MakeViewlessTensor
    from fusedops.viewless import assert_viewless_tensor as assert_viewless_tensor
    from fusedops.viewless import make_viewless_tensor as make_viewless_tensor
    from fusedops.viewless import safely_set_viewless_tensor_data as safely_set_viewless_tensor_data

# Loaded when first used: a program that runs ops does not need them, and they take a third of the import's time.
_LAZY = {
    "API_VERSION": "_contract.backend",
    "Adaptation": "_contract.kernel",
    "Backend": "_contract.backend",
    "BackendInfo": "_plugins.registration",
    "Case": "_contract.evidence",
    "Decision": "_report.decision",
    "Deviation": "_contract.kernel",
    "DeviceSpec": "_contract.device_spec",
    "Event": "_report.event",
    "Evidence": "_contract.evidence",
    "Kernel": "_contract.kernel",
    "MakeViewlessTensor": "viewless",
    "Mismatch": "_report.mismatch",
    "Plan": "_plan.report",
    "Replay": "_contract.kernel",
    "Rows": "_contract.evidence",
    "Stats": "_report.event",
    "Tolerance": "_contract.evidence",
    "Unavailable": "_contract.backend",
    "Verification": "_report.mismatch",
    "accept": "ops.sampling.formulas",
    "assert_viewless_tensor": "viewless",
    "backends": "_plugins.registration",
    "bind": "_bind",
    "compat": "compat",
    "constraints": "constraints",
    "explain": "_explain",
    "hookimpl": "_plugins.hookspecs",
    "integrations": "integrations",
    "kernel": "_contract.kernel",
    "kernels_of": "_contract.kernel",
    "losses": "losses",
    "make_viewless_tensor": "viewless",
    "nn": "nn",
    "philox": "philox",
    "plan": "_plan.plan",
    "register": "_plugins.registration",
    "reset_stats": "_dispatch.selection.stats",
    "safely_set_viewless_tensor_data": "viewless",
    "stats": "_dispatch.selection.stats",
    "tensor_cache": "tensor_cache",
    "testing": "testing",
    "unregister": "_plugins.registration",
    "verify": "_verify.verify",
    "viewless": "viewless",
    "warm_up": "_warm_up",
}
_MODULES = ("import_module", "paused", "TYPE_CHECKING", "Any")
__all__ = sorted(  # pyright: ignore[reportUnsupportedDunderAll]
    {name for name in globals() if not name.startswith("_") and name not in (*_MODULES, "OPS")} | set(_LAZY)
)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fusedops' has no attribute {name!r}")
    module = import_module(f"fusedops.{_LAZY[name]}")
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return __all__
