"""Training: loss, gradients, optimizers, the update step, and the loop with its hooks."""
