"""``make gpu``: every check and measurement that needs a GPU, in three commands of less than ten minutes."""
