"""Token mixers: one file each, and one line of `config/mixers.py`."""
