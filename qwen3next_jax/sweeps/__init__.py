"""Ablation sweeps. A sweep is a set of training runs, called points: one for each combination of
the values of some settings. This package makes the points, runs them, continues them after a crash,
and reports the results.
"""
