"""Ablation sweeps: points from axes, a runner that survives crashes, results, a report."""
