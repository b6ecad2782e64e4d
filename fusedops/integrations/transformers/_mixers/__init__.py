"""Functions of linear attention and of short convolutions."""
