"""Helpers that every subpackage may use: errors, files, digests, trees."""
