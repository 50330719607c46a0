"""One file for each optimizer of `config.registry.OPTIMIZERS`: the direction of an update, before
weight decay and learning rate.
"""
