"""How a kernel calls the library: its functions and structs, the library itself, and remembered calls."""
