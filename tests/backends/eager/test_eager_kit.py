"""The conformance kit's pairwise calls with slabs of 64 elements, whose edges these small calls all cross."""

from __future__ import annotations

import pytest
from conformance import WITHOUT_SLABS, pairwise_calls, passes

from fusedops import testing
from fusedops_eager import _slabs
from fusedops_eager.bias import _gelu
from fusedops_eager.convolution import _causal_conv
from fusedops_eager.gated import _swiglu
from fusedops_eager.norms import _gated_norms, _norms
from fusedops_eager.softmax import _softmax

CUT = [name for name in testing.OPS if name not in WITHOUT_SLABS]


@pytest.fixture(autouse=True)
def tiny_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_causal_conv, "_MIN_SLAB_ELEMENTS", 0)
    monkeypatch.setattr(_gated_norms, "_MIN_SLAB_ELEMENTS", 0)
    monkeypatch.setattr(_gelu, "_MIN_SLAB_ELEMENTS", 0)
    monkeypatch.setattr(_norms, "_MIN_SLAB_ELEMENTS", 0)
    monkeypatch.setattr(_swiglu, "MIN_SLAB_ELEMENTS", 0)
    monkeypatch.setattr(_softmax, "_MAX_PLAIN_ELEMENTS", 0)
    monkeypatch.setattr(_slabs, "SLAB", 64)


@pairwise_calls("eager", CUT, 2**11)
def test_the_kit_passes(check: testing.Check) -> None:
    passes(check)
