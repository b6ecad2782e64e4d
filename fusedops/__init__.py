"""One set of fused transformer operations; each call goes to Triton, torch_npu or eager torch, and a fallback is seen.

import fusedops
y = fusedops.scaled_masked_softmax(x, mask, scale=0.125)
print(fusedops.explain("scaled_masked_softmax", x, mask, 0.125))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fusedops import errors as errors
from fusedops import ops as ops
from fusedops._backend import API_VERSION as API_VERSION
from fusedops._backend import Backend as Backend
from fusedops._backend import Deviation as Deviation
from fusedops._backend import Kernel as Kernel
from fusedops._backend import Unavailable as Unavailable
from fusedops._backend import kernel as kernel
from fusedops._explain import explain as explain
from fusedops._in_force import checkpoint_contexts as checkpoint_contexts
from fusedops._in_force import get_policy as get_policy
from fusedops._in_force import set_policy as set_policy
from fusedops._in_force import use as use
from fusedops._op import OPS as _OPS
from fusedops._policy import Policy as Policy
from fusedops._registry import BackendInfo as BackendInfo
from fusedops._registry import backends as backends
from fusedops._registry import register as register
from fusedops._registry import unregister as unregister
from fusedops._spec import TensorSpec as TensorSpec
from fusedops._torch import register_op as _register_op
from fusedops.errors import FallbackWarning as FallbackWarning
from fusedops.errors import FusedOpsError as FusedOpsError
from fusedops.errors import FusedOpsWarning as FusedOpsWarning
from fusedops.errors import InvalidInputError as InvalidInputError
from fusedops.errors import MismatchError as MismatchError
from fusedops.errors import NoBackendError as NoBackendError
from fusedops.errors import PluginError as PluginError
from fusedops.errors import PolicyError as PolicyError
from fusedops.ops import bias_dropout as bias_dropout
from fusedops.ops import bias_dropout_add as bias_dropout_add
from fusedops.ops import bias_gelu as bias_gelu
from fusedops.ops import scaled_masked_softmax as scaled_masked_softmax
from fusedops.viewless import MakeViewlessTensor as MakeViewlessTensor
from fusedops.viewless import assert_viewless_tensor as assert_viewless_tensor
from fusedops.viewless import make_viewless_tensor as make_viewless_tensor
from fusedops.viewless import safely_set_viewless_tensor_data as safely_set_viewless_tensor_data

if TYPE_CHECKING:
    from fusedops import constraints as constraints
    from fusedops._adapt import Adaptation as Adaptation
    from fusedops._bind import bind as bind
    from fusedops._decision import Decision as Decision
    from fusedops._hooks import hookimpl as hookimpl
    from fusedops._stats import Event as Event
    from fusedops._stats import Stats as Stats
    from fusedops._stats import reset_stats as reset_stats
    from fusedops._stats import stats as stats
    from fusedops._verification import Verification as Verification
    from fusedops._verify import verify as verify

__version__ = "0.1.0"

for _each in _OPS.values():
    _register_op(_each)


# Not needed to run a program, so not paid for at import: looking, and what plugins are written with
_LATER = {
    "Adaptation": "_adapt",
    "Decision": "_decision",
    "Event": "_stats",
    "Stats": "_stats",
    "Verification": "_verification",
    "bind": "_bind",
    "constraints": "constraints",
    "hookimpl": "_hooks",
    "reset_stats": "_stats",
    "stats": "_stats",
    "verify": "_verify",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'fusedops' has no attribute {name!r}")
    module = import_module(f"fusedops.{_LATER[name]}")
    return getattr(module, name, module)
