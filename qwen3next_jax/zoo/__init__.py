"""Mixers and other parts of a block beside the released model's: one file for each family.

The core runs without this folder. `config/registry.py` names what is in it.
"""
