"""Training: training steps as pure functions of (state, batch), gradients, optimizers and schedules."""
