"""The processes of a run: launching them, coordinating them, watching them, restarting them."""
