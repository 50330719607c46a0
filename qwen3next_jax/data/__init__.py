"""Turns text on disk into batches. `sources` finds files, `readers` reads documents from files,
`tokens` encodes documents, `tokenized_parts` stores tokens, `packing` fills rows, `preparation`
writes rows to disk and opens them, and `pipeline` serves batches of rows. docs/data.md describes
the files.
"""
