"""Data that explains what fusedops did, and its text: reasons, decisions, events, mismatches. No logic, no state."""
