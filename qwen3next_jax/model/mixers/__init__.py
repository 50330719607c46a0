"""Token mixers: one file each, and one line of `config/registry.py`."""
