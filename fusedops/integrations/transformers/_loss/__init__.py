"""Loss functions, the fused loss with its deferred logits, and the losses of trl."""
