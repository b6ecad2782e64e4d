"""Results that are compared at run time, as ``fusedops.verify`` and the conformance kit do."""
