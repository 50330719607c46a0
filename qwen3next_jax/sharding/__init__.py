"""Makes the device mesh, and splits parameters, activations and batches over the mesh."""
