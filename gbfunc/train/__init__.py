"""Training: the step, a pure function of (state, batch); loss and gradient; optimizers and schedules."""
