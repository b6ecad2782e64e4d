"""fusedops in the programs of other libraries. Each module imports its library, and nothing here imports a module.

>>> import fusedops
>>> fusedops.integrations.__name__
'fusedops.integrations'
"""
