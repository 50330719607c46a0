"""The optimizers that `config.registry.OPTIMIZERS` lists, one file for each. An optimizer computes
the direction of an update; `training.optimizer` adds weight decay and the learning rate.
"""
