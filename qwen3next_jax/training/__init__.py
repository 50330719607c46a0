"""Training: loss, optimizer, step, checkpoints, telemetry, and the loop that ties them together."""
