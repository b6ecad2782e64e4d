"""Functions that rotate queries and keys, and the modules that call them."""
