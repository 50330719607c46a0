"""Training: loss, gradients, optimizers, stages, guards, diagnostics, the update step and the loop.

`runs.train` registers the hooks that the loop calls.
"""
