"""The report about runs: reads metrics.jsonl, reduces its events to series, draws charts and writes
report.html. It needs neither JAX nor a network.
"""
