"""From text on disk to batches: sources (documents), tokens, packing, preparation (shards),
pipeline (batches).
"""
