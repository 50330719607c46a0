"""Trains Qwen3-Next: the same as `qwen3next train`."""

import sys

from qwen3next_jax.__main__ import run_verb

if __name__ == "__main__":
    run_verb("train", sys.argv[1:])
