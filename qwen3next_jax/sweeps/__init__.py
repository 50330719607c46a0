"""Ablation sweeps: makes points from axes, runs them despite crashes, and reports the results."""
