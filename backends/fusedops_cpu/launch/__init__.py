"""The call of a function of the library: structs, the library itself, and calls that are remembered."""
