"""The ops as ``torch.ops.fusedops.*``: what torch.compile, export, fake tensors and tensor subclasses use."""
