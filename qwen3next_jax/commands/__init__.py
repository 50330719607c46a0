"""The commands `qwen3next VERB`, one file per verb."""
