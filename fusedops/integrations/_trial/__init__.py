"""Recognition: copies of a module with random numbers, runs beside the op, and what the code shows."""
