"""Writes the report about runs, report.html: reads the events of metrics.jsonl, reduces them to
series of few points, and draws charts. This package needs neither JAX nor a network.
"""
