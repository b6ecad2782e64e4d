"""How apply tells what a module computes: copies with random numbers, runs beside the op, and the code."""
