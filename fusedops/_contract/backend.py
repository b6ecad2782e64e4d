"""Backend: what a plugin provides, a named set of kernels for some device types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusedops._contract.device_spec import DeviceSpec
from fusedops._contract.kernel import Kernel, Replay
from fusedops._named_tuple import NamedTuple

# The version of what a plugin is written against: Backend, kernel, the constraints, and the signatures of the ops and
# their backwards. It rises when a change can break a working plugin.
API_VERSION = 2


class Unavailable(NamedTuple):
    """The result of a probe on a machine where the backend cannot run: why, and how to fix it.

    Args:
        why: one sentence.
        fix: what to do.

    >>> import fusedops
    >>> fusedops.Unavailable("torch_npu is not installed", "pip install torch_npu").fix
    'pip install torch_npu'
    """

    why: str
    fix: str


def _available() -> Unavailable | None:
    return None


@dataclass(frozen=True, eq=False)
class Backend:
    """A named set of kernels for some device types.

    Args:
        name: lower case, as users write it in a policy. Must equal the entry point's name.
        device_types: torch device types that it serves, such as ("cuda",); ("*",) is every device.
        priority: the default order is from high to low. A fallback for every device has 0, a backend for one device
            type has 100.
        kernels: made by :func:`fusedops.kernel`; or what :func:`fusedops.kernels_of` returns.
        probe: called once, when a call, a policy or a user first needs the backend. Returns None where it can run here,
            else :class:`Unavailable`. Import the vendor's library here, not when the plugin is imported.
        aliases: other names by which a policy may call it, if no backend has that name.
        needs: the hardware and packages that it runs on, for messages: "triton and an NVIDIA or AMD GPU".
        packages: the distributions that it builds on, whose versions ``fusedops info`` shows.
        tools: the commands that the driver of its devices installs, such as "nvidia-smi". If one is on the path,
            there is a device, and ``fusedops doctor`` reports why no backend serves it.
        variables: the environment variables that it reads, each with one sentence.
        optional: True where a refusal is ordinary, as with a faster variant of another backend. Unless a policy names
            the backend, its refusals do not count as fallbacks: they are not reported, ``fallback="raise"`` goes on to
            the next backend, and ``explain``, ``stats`` and ``fusedops doctor`` show them.
        records: functions of torch, by the names of their overloads, that the backend can make again in a recorded run,
            as in {"aten.add.Tensor": add}: called with the arguments, they return what the ``record`` of
            :func:`fusedops.kernel` does, or None for a call that they do not take. Their bits are torch's.
        chips: devices that ``fusedops.plan`` and ``fusedops plan`` know by name.
        fusedops_api: the ``fusedops.API_VERSION`` that the plugin is written for; with another the backend is refused.
            0: any.

    >>> import fusedops
    >>> fusedops.Backend("mine", ("cpu",), -1, ()).serves("cpu")
    True
    """

    name: str
    device_types: tuple[str, ...]
    priority: int
    kernels: Sequence[Kernel]
    probe: Callable[[], Unavailable | None] = _available
    aliases: tuple[str, ...] = ()
    needs: str = ""
    packages: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    optional: bool = False
    chips: tuple[DeviceSpec, ...] = ()
    records: Mapping[str, Callable[..., tuple[Any, Replay | None] | None]] = field(default_factory=lambda: {})
    fusedops_api: int = 0

    def serves(self, device_type: str) -> bool:
        """Return True where the backend serves tensors of this device type."""
        return "*" in self.device_types or device_type in self.device_types
