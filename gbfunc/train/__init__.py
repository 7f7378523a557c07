"""Training: pure training steps `(state, batch) -> (state, info)`, gradients, optimizers and learning rates."""
