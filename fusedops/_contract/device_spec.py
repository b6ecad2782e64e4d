"""DeviceSpec: what a plan of a model needs to know of a device that need not exist."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceSpec:
    """A device for :func:`fusedops.plan`, which this machine need not have.

    A backend declares the chips that it knows; ``plan(..., device="H100")`` finds them by the last word of ``chip``.

    Args:
        type: the device type, as torch names it: "cpu", "cuda", "npu", ...
        chip: its name, such as "Ascend A2"; empty for any device of the type.
        capability: the compute capability; None: any.
        memory: in bytes; 0: not known.
        packages: distributions that are installed beside it, such as "flash-attn": an optional backend that builds on
            one is taken for ready. The device's own backend always is.
        documented: the functions that the vendor documents for the chip, as ``source`` of kernels names them; another
            function of the vendor is a deviation. (): all.

    >>> import fusedops
    >>> print(fusedops.DeviceSpec("cuda", "H100", (9, 0), 80 * 2**30, packages=("flash-attn",)))
    H100
    """

    type: str
    chip: str = ""
    capability: tuple[int, int] | None = None
    memory: int = 0
    packages: tuple[str, ...] = ()
    documented: tuple[str, ...] = ()

    def documents(self, source: str) -> bool:
        """Return False for a function of the vendor that has no documentation for the chip."""
        library = source.partition(".")[0]
        of_vendor = [name for name in self.documented if name.partition(".")[0] == library]
        return not of_vendor or any(source.startswith(name) for name in of_vendor)  # npu_x_backward is of npu_x's page

    def __str__(self) -> str:
        return self.chip or self.type
