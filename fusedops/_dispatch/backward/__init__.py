"""The needs of a backward besides its kernel: batched gradients, and the state of the tensors that autograd saved."""
