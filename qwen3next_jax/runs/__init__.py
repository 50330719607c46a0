"""Training runs that record what they do and can resume: the run's folder, checkpoints, metrics and
display.
"""
