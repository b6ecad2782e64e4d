"""The explorer page of the documentation: its data, its modules, and what makes one page of them."""
