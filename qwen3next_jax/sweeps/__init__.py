"""Ablation sweeps: a sweep is a set of runs, its points, one for each combination of the values of
some settings. This package makes the points, runs them despite crashes, and reports the results.
"""
