"""Processes of a run: starting, agreeing, watching, restarting."""
