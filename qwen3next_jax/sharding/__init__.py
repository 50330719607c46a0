"""The device mesh, and what lies where on it."""
