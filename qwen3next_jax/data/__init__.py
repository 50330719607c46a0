"""Turns text on disk into batches: `sources` reads documents, `tokens` encodes them, `packing`
fills rows, `preparation` writes and reads shards of rows, `pipeline` serves batches.
"""
