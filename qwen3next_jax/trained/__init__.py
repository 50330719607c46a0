"""Trained models: loading one from a run or from a Hugging Face directory, and merging checkpoints.

Commands and scripts use this folder; a training run does not need it.
"""
