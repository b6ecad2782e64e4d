"""The version of fusedops."""

__version__ = "0.1.0"
