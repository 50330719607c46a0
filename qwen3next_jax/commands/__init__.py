"""The commands `qwen3next VERB`, such as `qwen3next generate`, with one file per verb."""
