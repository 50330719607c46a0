"""Evaluations: measurements of a trained model on rows that it was not trained on."""
