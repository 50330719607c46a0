"""Turns text on disk into batches: `sources` finds files, `readers` reads their documents, `tokens`
encodes them, `tokenized_parts` stores their tokens, `packing` fills rows, `preparation` writes the
rows to disk and opens them, and `pipeline` serves batches of rows. docs/data.md describes the
files.
"""
