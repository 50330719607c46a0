"""The page that shows runs: events of metrics.jsonl → series → charts → report.html. Needs
neither JAX nor a network.
"""
