"""Evaluates a run or a Hugging Face directory: the same as `qwen3next eval`."""

import sys

from qwen3next_jax.__main__ import run_verb

if __name__ == "__main__":
    run_verb("eval", sys.argv[1:])
