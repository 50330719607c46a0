"""Trains Qwen3-Next: the same as `qwen3next train`."""

import sys

from qwen3next_jax.__main__ import run

if __name__ == "__main__":
    run("train", sys.argv[1:])
