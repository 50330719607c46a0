"""The device mesh, and how parameters, activations and batches are split over it."""
