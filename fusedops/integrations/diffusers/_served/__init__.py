"""The calls that a changed forward makes: by an op where it takes the call, else as the forward had it."""
