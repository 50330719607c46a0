"""The fault table: every fault a run must survive, with real processes, signals, bits and disks.
See `__main__`.
"""
