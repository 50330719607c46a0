"""One file a verb of `qwen3next VERB`."""
