"""Resumable, recorded training runs: folder, checkpoints, metrics, display."""
