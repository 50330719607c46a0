"""Modules under which mixers outside this package may still import the base classes of mixers."""
