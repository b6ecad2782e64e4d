"""The op of short convolutions, as models with linear attention have."""
