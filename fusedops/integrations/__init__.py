"""fusedops in the programs of other libraries. Each module imports its library, and nothing here imports a module.

>>> import fusedops
>>> fusedops.integrations.__name__
'fusedops.integrations'
"""

#: The distributions whose versions matter to a program that uses an integration.
PACKAGES = ("transformers", "accelerate", "peft", "trl", "sentence-transformers", "diffusers", "gguf", "megatron-core")
