"""``make gpu``: every check and measurement that needs a GPU, in one command of at most nine minutes."""
