"""Launches, coordinates, watches and restarts the processes of a run."""
