"""Ablation sweeps: points from axes, a runner that survives, results and findings, a report."""
