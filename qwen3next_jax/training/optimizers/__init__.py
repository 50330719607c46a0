"""One file per optimizer of `config.optimizers`: what gradients become before weight decay and
learning rate.
"""
